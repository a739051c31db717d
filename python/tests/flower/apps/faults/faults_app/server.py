"""Averages with FedAvg while a client has a fault, and notes whose replies came in each round."""

import time

import numpy as np
from probes import Server, pack, usage

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def strategy(config: dict) -> FedAvg:
    kind = FedAvg
    if config["streaming"]:
        from fedlane.flower import FedAvg as kind
    return kind(fraction_evaluate=1.0 if config["evaluate"] else 0.0, min_evaluate_nodes=1, min_train_nodes=1,
                min_available_nodes=1)


def initial(config: dict) -> ArrayRecord:
    """The model: "weights", and with "dtypes" small and large arrays of other dtypes."""
    arrays = {"weights": np.zeros(int(config["elements"]), np.float32)}
    if config["dtypes"]:
        import ml_dtypes

        kinds = [np.float16, np.float64, np.int64, ml_dtypes.bfloat16]
        arrays |= {f"{np.dtype(kind).name} {shape}": np.zeros(shape, kind)
                   for kind in kinds for shape in ((), (0, 3), (5,), (70, 71))}
    return ArrayRecord({name: Array(each) for name, each in arrays.items()})


def note_replies(server: Server, partitions: dict[int, int]) -> list[dict]:
    """Notes, for each round, the partitions whose replies were good, and the reasons of the others."""
    rounds: list[dict] = []
    send_and_receive = server.grid.send_and_receive

    def noted(messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        began = time.monotonic()
        replies = list(send_and_receive(messages, timeout=timeout))
        if messages and messages[0].metadata.message_type == "train":
            good = sorted(partitions[each.metadata.src_node_id] for each in replies if not each.has_error())
            errors = [each.error.reason for each in replies if each.has_error()]
            rounds.append({"good": good, "errors": errors, "seconds": time.monotonic() - began, "usage": usage()})
        return replies

    server.grid.send_and_receive = noted
    return rounds


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    config = server.config
    partitions = server.partitions(int(config["clients"]))
    rounds = note_replies(server, partitions)
    result = strategy(config).start(
        server.grid, initial(config), num_rounds=int(config["rounds"]), timeout=float(config["timeout-s"]))
    weights = result.arrays["weights"].numpy()
    rest = {name: each for name, each in result.arrays.items() if name != "weights"}
    server.save(rounds=rounds, least=float(weights.min()), most=float(weights.max()),
                elements=weights.size, rest=pack(rest),
                evaluated={number: dict(each) for number, each in result.evaluate_metrics_clientapp.items()})
