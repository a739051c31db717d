"""Runs many strategies at once on one grid, to pay Flower's seconds per round only once.

Each strategy's `start` runs in a thread of its own, but only one thread runs at a time, in a fixed order, so
everything stays the same from run to run. When all of them wait for replies, what they send to one node goes
out as one message, with the name of the strategy before the key of each record.
"""

import queue
import threading
import zlib
from collections.abc import Callable, Iterable

import numpy as np
from probes import in_order

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class Lane(Grid):
    """The grid that one strategy sees."""

    def __init__(self, name: str, bundle: "Bundle", work: Callable[[Grid], object]) -> None:
        self.name, self.bundle, self.work = name, bundle, work
        self.asked: queue.Queue[list[Message] | None] = queue.Queue()
        self.replies: queue.Queue[list[Message]] = queue.Queue()
        self.result: object = None
        self.waves = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._seed()
        try:
            self.result = self.work(self)
        except Exception as error:
            self.result = error
        self.asked.put(None)

    def _seed(self) -> None:
        self.waves += 1
        np.random.seed(zlib.crc32(f"{self.name} {self.waves}".encode()))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if not messages:
            return []
        self.asked.put(messages)
        replies = self.replies.get()
        self._seed()
        return replies

    def get_node_ids(self) -> Iterable[int]:
        return self.bundle.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("strategies only send and receive")

    pull_messages = push_messages

    def set_run(self, run: object) -> None:
        raise NotImplementedError("strategies do not set the run")

    @property
    def run(self) -> object:
        return self.bundle.grid.run

    def create_message(self, *arguments: object, **named: object) -> Message:
        raise NotImplementedError("replaced by Message(...)")


class Bundle:
    """Strategies that run together; `partitions` gives the order of replies."""

    def __init__(self, grid: Grid, partitions: dict[int, int]) -> None:
        self.grid, self.partitions = grid, partitions

    def run(self, works: dict[str, Callable[[Grid], object]]) -> dict[str, object]:
        """Calls each work with a grid; returns what each returned, or the exception it raised."""
        lanes = [Lane(name, self, work) for name, work in works.items()]
        asked = {}
        for lane in lanes:
            lane.thread.start()
            asked[lane.name] = lane.asked.get()
        while sent := {name: messages for name, messages in asked.items() if messages is not None}:
            replies = self._exchange(sent)
            for lane in lanes:
                if lane.name in sent:
                    lane.replies.put(replies[lane.name])
                    asked[lane.name] = lane.asked.get()
        return {lane.name: lane.result for lane in lanes}

    def _exchange(self, sent: dict[str, list[Message]]) -> dict[str, list[Message]]:
        by_node: dict[int, dict[str, Message]] = {}
        for name, messages in sent.items():
            for message in messages:
                by_node.setdefault(message.metadata.dst_node_id, {})[name] = message
        # Strategies give all their messages one content. So does the bundle, where it can.
        contents: dict[tuple, RecordDict] = {}
        messages = []
        for node, parts in by_node.items():
            same = tuple(id(each.content) for each in parts.values())
            content = contents.setdefault(same, join({name: each.content for name, each in parts.items()}))
            messages.append(Message(content, dst_node_id=node, message_type="train"))
        split: dict[str, list[Message]] = {name: [] for name in sent}
        for reply in in_order(self.grid.send_and_receive(messages, timeout=600), self.partitions):
            asked = by_node[reply.metadata.src_node_id]
            for name, content in parts_of(answer(reply)).items():
                split[name].append(Message(content, reply_to=asked[name]))
        return split


def answer(reply: Message) -> RecordDict:
    if reply.has_error():
        raise RuntimeError(f"a client failed: {reply.error.reason}")
    return reply.content


def join(parts: dict[str, RecordDict]) -> RecordDict:
    """One RecordDict of many: the keys are "name|key"."""
    return RecordDict({f"{name}|{key}": record for name, part in parts.items() for key, record in part.items()})


def parts_of(content: RecordDict) -> dict[str, RecordDict]:
    """The opposite of join."""
    parts: dict[str, RecordDict] = {}
    for key, record in content.items():
        name, inner = key.split("|", 1)
        parts.setdefault(name, RecordDict())[inner] = record
    return parts
