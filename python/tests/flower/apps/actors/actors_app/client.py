"""Adds 2^partition to the model, and checks that what the process kept of earlier messages is as it was."""

import hashlib

import numpy as np
from probes import answer_partition, switch_mod

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[switch_mod])
app.query("partition")(answer_partition)

KEPT_VIEWS = 6
kept: list[tuple[np.ndarray, str]] = []


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes()).hexdigest()


def check_kept() -> int:
    if any(digest(view) != before for view, before in kept):
        raise RuntimeError("an array that was kept has changed")
    return len(kept)


def keep(view: np.ndarray) -> None:
    if len(kept) < KEPT_VIEWS:
        kept.append((view, digest(view)))


def check_state(context: Context, number: int) -> None:
    """What the client put into its state in the round before is there, in whichever process it is now."""
    partition = int(context.node_config["partition-id"])
    for name in ("own", "model", "update"):
        expected = context.state["digests"][name] if number > 1 else None
        if number > 1 and digest(context.state[name]["first"].numpy()) != expected:
            raise RuntimeError(f"round {number}: {name} of partition {partition} has changed in the state")


def put_in_state(context: Context, model: ArrayRecord, update: ArrayRecord, number: int) -> None:
    own = np.full(20_000, number + context.node_config["partition-id"] / 8, np.float32)
    records = {"own": ArrayRecord({"first": Array(own)}), "model": model, "update": update}
    for name, record in records.items():
        context.state[name] = record
    digests = {name: digest(record["first"].numpy()) for name, record in records.items()}
    context.state["digests"] = ConfigRecord(digests)


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    checked = check_kept()
    model = message.content["arrays"]
    arrays = {name: each.numpy() for name, each in model.items()}
    keep(model["first"].numpy())
    for each in arrays.values():
        each += np.float32(2**partition)
    update = ArrayRecord({name: Array(each) for name, each in arrays.items()})
    keep(arrays["first"])
    if context.run_config["state"]:
        check_state(context, number)
        put_in_state(context, model, update, number)
    metrics = MetricRecord({"num-examples": 1, "checked": checked})
    return Message(RecordDict({"arrays": update, "metrics": metrics}), reply_to=message)
