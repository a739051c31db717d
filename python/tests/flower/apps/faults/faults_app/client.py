"""Adds 2^partition to the model, so that the mean tells who was counted; and fails on demand."""

import atexit
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
from probes import answer_partition, switch_mod

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

UPLOAD_BEGINS_S = 0.05
# What is added to the arrays of other dtypes, for the mean of four clients to be a whole number.
WHOLE = 4


def flipped(content: RecordDict, record: str, key: str) -> RecordDict:
    """The content with one bit of a bytes value, or of a number, turned over."""
    values = dict(content[record])
    if isinstance(values[key], int):
        values[key] ^= 32
    else:
        values[key] = bytes([values[key][0] ^ 1]) + values[key][1:]
    return RecordDict(dict(content.items()) | {record: ConfigRecord(values)})


def meddle(message: Message, context: Context, call_next) -> Message:
    """What run_config "meddle" says of this partition, in the order of partitions, with commas between:

    none: no mod of fedlane; else, one bit is wrong in the secret of the model, in that of the
    update, in the version of the order or in the number of the update.
    """
    kinds = dict(enumerate(str(context.run_config["meddle"]).split(",")))
    kind = kinds.get(int(context.node_config["partition-id"]), "")
    if kind == "" or not {"fedlane", "arrays"} <= message.content.keys():
        return switch_mod(message, context, call_next)
    if kind == "none":
        return call_next(message, context)
    if kind == "model":
        message.content = flipped(message.content, "arrays", "fedlane.model")
    if kind == "update":
        message.content = flipped(message.content, "fedlane", "key")
    if kind == "version":
        message.content = flipped(message.content, "fedlane", "version")
    reply = switch_mod(message, context, call_next)
    if kind == "number":
        reply.content = flipped(reply.content, "arrays", "fedlane.update")
    return reply


app = ClientApp(mods=[meddle])
app.query("partition")(answer_partition)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kill(pid: int, after_s: float = 0.0) -> None:
    """SIGKILL; with after_s it comes while the reply, of hundreds of megabytes, is on its way."""
    def strike() -> None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def fail(fault: str, result: Path) -> None:
    if fault == "raise":
        raise RuntimeError("this client was told to raise")
    if fault == "sleep":
        result.with_suffix(".asleep").touch()
        time.sleep(3600)
    if fault == "linger":
        # The reply is delivered, and this process lives on.
        atexit.register(time.sleep, 3600)
    if fault == "kill-app":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill-upload":
        kill(os.getpid(), UPLOAD_BEGINS_S)
    if fault == "kill-node":
        # The SuperExec started this process, and the SuperNode the SuperExec.
        kill(parent(os.getppid()), UPLOAD_BEGINS_S)


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, fault = int(context.node_config["partition-id"]), context.run_config["fault"]
    result = Path(context.run_config["result"])
    number = int(message.content["config"]["server-round"])
    arrays = {name: each.numpy() for name, each in message.content["arrays"].items()}
    for name, each in arrays.items():
        if not name.startswith("grown"):
            each += np.array(2**partition * (1 if name == "weights" else WHOLE)).astype(each.dtype)
    if fault == "grow":
        arrays[f"grown{number}"] = np.full((number, 3), number, np.float64)
    elif fault == "pause":
        # Until the test has done what it has to do between download and upload.
        result.with_suffix(f".paused{partition}").touch()
        wait_for(result.with_suffix(".go"))
    elif number == 1 and partition == int(context.run_config["partition"]):
        fail(fault, result)
    record = ArrayRecord({name: Array(each) for name, each in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    first = float(message.content["arrays"]["weights"].numpy()[0])
    return Message(RecordDict({"metrics": MetricRecord({"first": first, "num-examples": 1})}), reply_to=message)
