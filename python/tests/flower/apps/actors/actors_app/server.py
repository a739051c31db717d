"""Averages with FedAvg, and notes after every round what this process holds."""

import os
from pathlib import Path

import numpy as np
from probes import Server

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def held() -> dict[str, int]:
    """Open files of this process, and its memory in bytes, memory files that it maps included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = sum(int(status[key].split()[0]) for key in ("RssAnon", "RssShmem"))
    return {"files": len(os.listdir("/proc/self/fd")), "bytes": resident << 10}


def strategy(config: dict, clients: int) -> FedAvg:
    kind = FedAvg
    if config["streaming"]:
        from fedlane.flower import FedAvg as kind
    return kind(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    clients, elements = int(server.config["clients"]), int(server.config["elements"])
    initial = ArrayRecord({name: Array(np.full(elements, start, np.float32))
                           for name, start in (("first", 0.5), ("second", -3.0))})
    rounds = []

    def note(number: int, arrays: ArrayRecord) -> MetricRecord:
        rounds.append(held())
        return MetricRecord()

    result = strategy(server.config, clients).start(
        server.grid, initial, num_rounds=int(server.config["rounds"]), timeout=120, evaluate_fn=note)
    arrays = {name: each.numpy() for name, each in result.arrays.items()}
    metrics = [dict(each) for each in result.train_metrics_clientapp.values()]
    server.save(rounds=rounds, metrics=metrics,
                values={name: sorted({float(each.min()), float(each.max())}) for name, each in arrays.items()})
