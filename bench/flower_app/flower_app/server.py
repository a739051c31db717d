"""Runs rounds of FedAvg, notes when each began and ended, and checks the whole model at the end."""

import json
import os
import time
from pathlib import Path

import numpy as np

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .model import model

app = ServerApp()


def timed(kind: type[FedAvg], rounds: list[dict], initial: ArrayRecord) -> type[FedAvg]:
    class Timed(kind):
        def configure_train(self, server_round, arrays, config, grid):
            rounds.append({"begin": time.time()})
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            result = super().aggregate_train(server_round, replies)
            rounds[-1]["end"] = time.time()
            # Flower holds the first model to the end; a model of gigabytes is better let go.
            initial.clear()
            return result

    return Timed


def right(arrays: ArrayRecord, config: dict) -> bool:
    """Client i adds i + 1 in every round, and all weigh the same."""
    clients, rounds = int(config["clients"]), int(config["rounds"])
    added = rounds * (clients + 1) / 2
    names = []
    for name, expected in model(int(config["bytes"]), config["dtype"]):
        names.append(name)
        actual = arrays[name].numpy()
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        expected += np.asarray(added, expected.dtype)
        if not np.allclose(actual, expected, rtol=1e-2 if expected.itemsize < 4 else 1e-5):
            return False
    return names == list(arrays)


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, kind, rounds = context.run_config, FedAvg, []
    if config["mode"] != "plain":
        from fedlane.flower import FedlaneGrid

        grid = FedlaneGrid(grid, context)
    if config["mode"] == "streaming":
        from fedlane.flower import FedAvg as kind
    clients = int(config["clients"])
    initial = ArrayRecord({name: Array(each) for name, each in model(int(config["bytes"]), config["dtype"])})
    strategy = timed(kind, rounds, initial)(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(grid, initial, num_rounds=int(config["rounds"]), timeout=3600)
    file = Path(config["result"])
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"rounds": rounds, "verified": right(result.arrays, config), "pid": os.getpid()}))
    part.rename(file)
