"""Runs the strategies and writes the final arrays of each."""

from collections.abc import Callable

import numpy as np
from probes import Server, in_order, pack

from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from .bundle import Bundle
from .table import CASES, Case

app = ServerApp()


def work(name: str, case: Case, clients: int, rounds: int) -> Callable[[Grid], Result]:
    def start(grid: Grid) -> Result:
        initial = ArrayRecord({key: Array(each) for key, each in case.model(list(CASES).index(name)).items()})
        config = ConfigRecord({"name": name, "clip": case.clip})
        return case.make(clients).start(grid, initial, num_rounds=rounds, timeout=600, train_config=config)

    return start


def one_by_one(server: Server, partitions: dict[int, int], works: dict) -> dict[str, object]:
    send_and_receive = server.grid.send_and_receive

    def ordered(messages, *, timeout=None):
        replies = in_order(send_and_receive(messages, timeout=timeout), partitions)
        np.random.seed(1)
        return replies

    server.grid.send_and_receive = ordered
    results: dict[str, object] = {}
    for name, each in works.items():
        np.random.seed(1)
        try:
            results[name] = each(server.grid)
        except Exception as error:
            results[name] = error
    return results


def report(result: object) -> dict:
    if isinstance(result, Exception):
        return {"error": f"{type(result).__name__}: {result}"}
    metrics = {str(number): dict(each) for number, each in result.train_metrics_clientapp.items()}
    return {"arrays": pack(result.arrays), "metrics": metrics}


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    clients, rounds = int(server.config["clients"]), int(server.config["rounds"])
    names = server.config["only"].split(",") if server.config["only"] else list(CASES)
    partitions = server.partitions(clients)
    works = {name: work(name, CASES[name], clients, rounds) for name in names}
    if server.config["bundle"]:
        results = Bundle(server.grid, partitions).run(works)
    else:
        results = one_by_one(server, partitions, works)
    server.save(strategies={name: report(each) for name, each in results.items()})
