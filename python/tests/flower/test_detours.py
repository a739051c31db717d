"""Nodes that cannot be served, names that an app may not use, clients that must wait: without Flower's processes."""

import importlib
import os
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

pytest.importorskip("fedlane.flower")

from fedlane import pool
from fedlane.flower import FedlaneGrid, fedlane_mod, tickets
from fedlane.flower.host import Host
from fedlane.handover import Counter, Line

NODE = 7
APP_FAILED = 2


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Newer versions of Flower make messages only in a process that knows its run."""
    try:
        known = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except ImportError:
        return
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(known, name, 1)


class Network:
    """Stands for Flower's grid, with one node. answer: the content of its next reply, or an error."""

    def __init__(self) -> None:
        self.answer: RecordDict | Error = RecordDict()
        self.pushed: list[Message] = []
        self._number = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._number += 1
            message.metadata.__dict__ |= {"_message_id": str(self._number), "_run_id": 1}
            self.pushed.append(message)
            ids.append(str(self._number))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = [each for each in self.pushed if each.metadata.message_id in set(message_ids)]
        answer = [Message(self.answer, reply_to=each) for each in asked]
        self.answer = plain_answer()
        return answer


def plain_answer() -> RecordDict:
    return RecordDict({"arrays": record(2.0)})


def record(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(5000, value, np.float32))})


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def grid(monkeypatch, network):
    # It would stay so for the tests that measure memory.
    monkeypatch.setattr("fedlane.flower.grid.keep_freed_memory", lambda: None)
    context = Context(1, 1, {}, RecordDict(), {"fedlane.host": "127.0.0.1", "fedlane.deadline-s": 5.0})
    return FedlaneGrid(network, context)


def ask(grid: FedlaneGrid, network: Network, answer: RecordDict | Error) -> int:
    """Sends a model, and has the node answer so; returns how many messages were sent, in the end, with arrays."""
    network.pushed.clear()
    network.answer = answer
    message = Message(RecordDict({"arrays": record(1.0)}), dst_node_id=NODE, message_type="train")
    list(grid.send_and_receive([message], timeout=20))
    return sum(bool(tickets.array_records(each.content)) for each in network.pushed)


def refusal() -> RecordDict:
    return RecordDict({tickets.ORDER: tickets.refusal("told to refuse")})


def served() -> RecordDict:
    return RecordDict({tickets.ORDER: tickets.word()})


def elapse(grid: FedlaneGrid) -> float:
    """Ends the time in which the node goes Flower's own way; returns how long that was to be."""
    detour = grid._detours[NODE]
    detour.until_s -= detour.lasts_s
    return detour.lasts_s


@pytest.mark.parametrize("answer", [refusal(), Error(APP_FAILED, "told to fail")], ids=["refused", "failed"])
def test_a_node_that_could_not_be_served_is_tried_again(grid, network, answer):
    assert ask(grid, network, answer) == 1
    assert ask(grid, network, plain_answer()) == 1, "not at once"
    assert len(network.pushed) == 1
    assert elapse(grid) == 60.0
    assert ask(grid, network, served()) == 0
    assert ask(grid, network, served()) == 0


def test_each_try_that_fails_makes_the_next_one_later(grid, network):
    lasted = []
    for _ in range(7):
        assert ask(grid, network, refusal()) == 1
        lasted.append(elapse(grid))
    assert lasted == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0]
    ask(grid, network, served())
    ask(grid, network, refusal())
    assert elapse(grid) == 60.0, "it has been served in between"


def test_an_app_without_the_mod_is_not_asked_again(grid, network):
    assert ask(grid, network, plain_answer()) == 1
    assert grid._detours[NODE].lasts_s == float("inf")
    assert ask(grid, network, plain_answer()) == 1
    assert len(network.pushed) == 1


TAKEN = pytest.mark.parametrize(
    "content",
    [
        RecordDict({"fedlane": ConfigRecord({"mine": 1})}),
        RecordDict({"mine": ConfigRecord({"fedlane.model": b"1"})}),
        RecordDict({"mine": ConfigRecord({"fedlane.update": 1})}),
    ],
    ids=["record", "model", "update"],
)


@TAKEN
def test_names_of_fedlane_are_refused_in_messages(grid, content):
    message = Message(content, dst_node_id=NODE, message_type="train")
    with pytest.raises(ValueError, match="fedlane needs the"):
        grid.push_messages([message])


@TAKEN
def test_names_of_fedlane_are_refused_in_replies(content):
    order = tickets.Order(["127.0.0.1:9"], "", tickets.new_key(), 5.0)
    message = Message(RecordDict({tickets.ORDER: order.record()}), dst_node_id=NODE, message_type="train")
    message.metadata.__dict__ |= {"_message_id": "1", "_run_id": 1}
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ValueError, match="fedlane needs the"):
        fedlane_mod(message, context, lambda asked, _: Message(content, reply_to=asked))


def test_a_client_that_waits_for_memory_is_told_why(monkeypatch):
    monkeypatch.setattr(pool, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(pool, "available_bytes", lambda: pool.RESERVE_BYTES + 1500)
    everybody = pool.Pool()
    assert everybody.admit("first", 1000) == ""
    assert "promised to 1 clients" in everybody.admit("second", 1000)
    assert everybody.admit("first", 1000) == "", "two that are in would wait for each other"
    everybody.leave("first", 1000)
    everybody.leave("first", 1000)
    assert everybody.admit("second", 1000) == ""


def test_a_client_that_waits_says_so_and_goes_on(monkeypatch):
    answers = [{"wait": "told to wait"}] * 2 + [{"header": "", "position": 0}]

    def desk(request: dict, _fd: int | None) -> tuple[dict, int | None]:
        answer = answers.pop(0)
        return answer, None if "wait" in answer else file

    file = os.memfd_create("test")
    name = f"fedlane-test-wait-{os.getpid()}"
    counter = Counter(name, lambda: desk)
    monkeypatch.setattr("fedlane.flower.host.connect_to_pool", lambda: Line.connect(name, 5.0))
    said = []
    monkeypatch.setattr("fedlane.flower.host.log", lambda level, text, *values: said.append(text % values))
    header, _, position = Host(tickets.Order(["a:1"], "", b"", 5.0), "test", "run").model(b"k", 0)
    counter.close()
    os.close(file)
    assert (header, position, answers) == (b"", 0, [])
    assert [each.split(":")[-1].strip() for each in said][0] == "told to wait"
    assert len(said) == 2
