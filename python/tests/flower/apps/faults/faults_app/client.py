"""Adds 2^partition to the model, so that the mean tells who was counted; and fails on demand."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
from probes import answer_partition, switch_mod

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[switch_mod])
app.query("partition")(answer_partition)

UPLOAD_BEGINS_S = 0.05


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kill(pid: int, after_s: float = 0.0) -> None:
    """SIGKILL; with after_s it comes while the reply, of hundreds of megabytes, is on its way."""
    def strike() -> None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


def fail(fault: str, result: Path) -> None:
    if fault == "raise":
        raise RuntimeError("this client was told to raise")
    if fault == "sleep":
        result.with_suffix(".asleep").touch()
        time.sleep(3600)
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
    number = int(message.content["config"]["server-round"])
    arrays = {name: each.numpy() for name, each in message.content["arrays"].items()}
    arrays["weights"] += np.float32(2**partition)
    if fault == "grow":
        arrays[f"grown{number}"] = np.full((number, 3), number, np.float64)
    elif number == 1 and partition == int(context.run_config["partition"]):
        fail(fault, Path(context.run_config["result"]))
    record = ArrayRecord({name: Array(each) for name, each in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
