"""Averages with FedAvg while a client has a fault, and notes whose replies came in each round."""

import numpy as np
from probes import Server, pack

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def strategy(config: dict) -> FedAvg:
    kind = FedAvg
    if config["streaming"]:
        from fedlane.flower import FedAvg as kind
    return kind(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


def note_replies(server: Server, partitions: dict[int, int]) -> list[dict]:
    """Notes, for each round, the partitions whose replies were good, and the reasons of the others."""
    rounds: list[dict] = []
    send_and_receive = server.grid.send_and_receive

    def noted(messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        replies = list(send_and_receive(messages, timeout=timeout))
        if messages:
            good = sorted(partitions[each.metadata.src_node_id] for each in replies if not each.has_error())
            rounds.append({"good": good, "errors": [each.error.reason for each in replies if each.has_error()]})
        return replies

    server.grid.send_and_receive = noted
    return rounds


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    config = server.config
    partitions = server.partitions(int(config["clients"]))
    rounds = note_replies(server, partitions)
    initial = ArrayRecord({"weights": Array(np.zeros(int(config["elements"]), np.float32))})
    result = strategy(config).start(
        server.grid, initial, num_rounds=int(config["rounds"]), timeout=float(config["timeout-s"]))
    weights = result.arrays["weights"].numpy()
    rest = {name: each for name, each in result.arrays.items() if name != "weights"}
    server.save(rounds=rounds, least=float(weights.min()), most=float(weights.max()),
                elements=weights.size, rest=pack(rest))
