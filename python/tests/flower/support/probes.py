"""What the apps of these tests share: the switch, a look at what Flower carries, and results as files."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid


def record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    """What Flower has to carry for a record: its arrays, or the record as it is serialised."""
    return record.count_bytes() if isinstance(record, ArrayRecord) else len(record.deflate())


def carried(message: Message) -> dict:
    """What Flower has to carry for a message: bytes of arrays, and of its largest record."""
    records = [] if message.has_error() else list(message.content.values())
    # What stands for an array is written down as Flower writes it, with its name.
    tickets = [] if message.has_error() else [
        len(name) + record_bytes(each) for name, each in message.content.items()
        if name == "fedlane" or (isinstance(each, ConfigRecord) and any("fedlane." in key for key in each))]
    return {
        "type": message.metadata.message_type,
        "array_bytes": sum(map(record_bytes, (each for each in records if isinstance(each, ArrayRecord)))),
        "largest_record_bytes": max(map(record_bytes, records), default=0),
        "largest_ticket_bytes": max(tickets, default=0),
        "records": len(records),
    }


class Server:
    """The ServerApp's side of an app: `grid` is Flower's own, or fedlane's around it when the switch is on.

    down, up: what Flower carried to the clients and back, one dict for each message.
    """

    def __init__(self, grid: Grid, context: Context) -> None:
        self.config = context.run_config
        self.down: list[dict] = []
        self.up: list[dict] = []
        self._probe(grid)
        if self.config["fedlane"]:
            from fedlane.flower import FedlaneGrid

            grid = FedlaneGrid(grid, context)
        self.grid = grid

    def _probe(self, grid: Grid) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.down += map(carried, messages)
            return push(messages)

        def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
            messages = list(pull(message_ids))
            self.up += map(carried, messages)
            return messages

        # Set on the object, so that Flower's own send_and_receive meets them too.
        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def partitions(self, count: int) -> dict[int, int]:
        """Asks every node for its partition: node id -> partition. Waits for `count` nodes."""
        return ask_partitions(self.grid, count)

    def save(self, **result: object) -> None:
        """Writes the result file, whole or not at all, with what Flower carried."""
        file = Path(self.config["result"])
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result | {"down": self.down, "up": self.up, "pid": os.getpid()}, default=repr))
        part.rename(file)


def usage() -> dict[str, dict[str, int]]:
    """What this ServerApp and the pool of its deployment hold: bytes of memory, and open files."""
    pids = {"server": os.getpid()} | {"pool": pid for pid in pools()}
    return {role: {"bytes": resident_bytes(pid), "files": len(os.listdir(f"/proc/{pid}/fd"))}
            for role, pid in pids.items()}


def pools() -> list[int]:
    mark = f"FEDLANE_TEST_DEPLOYMENT={os.environ['FEDLANE_TEST_DEPLOYMENT']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"fedlane.pool" in (folder / "cmdline").read_bytes() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def resident_bytes(pid: int) -> int:
    """Private memory, and memory files that are mapped."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem")) << 10


def ask_partitions(grid: Grid, count: int) -> dict[int, int]:
    import time

    while len(nodes := list(grid.get_node_ids())) < count:
        time.sleep(0.2)
    ask = RecordDict({"ask": ConfigRecord({"what": "partition"})})
    messages = [Message(ask, dst_node_id=node, message_type="query.partition") for node in nodes]
    return {each.metadata.src_node_id: each.content["answer"]["partition"]
            for each in grid.send_and_receive(messages)}


def answer_partition(message: Message, context: Context) -> Message:
    """The ClientApp's side of `ask_partitions`."""
    answer = ConfigRecord({"partition": int(context.node_config["partition-id"])})
    return Message(RecordDict({"answer": answer}), reply_to=message)


def in_order(replies: Iterable[Message], partitions: dict[int, int]) -> list[Message]:
    """Replies in the order of partitions: sums of floats depend on the order, and arrival differs each time."""
    return sorted(replies, key=lambda each: partitions[each.metadata.src_node_id])


def switch_mod(message: Message, context: Context, call_next) -> Message:
    """fedlane's mod when the switch is on, nothing otherwise."""
    if not context.run_config["fedlane"]:
        return call_next(message, context)
    from fedlane.flower import fedlane_mod

    return fedlane_mod(message, context, call_next)


def pack(arrays: ArrayRecord | dict[str, np.ndarray]) -> dict[str, list]:
    """Arrays as JSON: name -> [dtype, shape, bytes in C order]. Nothing is rounded."""
    plain = {name: each.numpy() if isinstance(each, Array) else each for name, each in arrays.items()}
    return {name: [each.dtype.str, list(each.shape), base64.b64encode(each.tobytes()).decode()]
            for name, each in plain.items()}
