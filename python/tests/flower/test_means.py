"""Means of replies that are here: what must not be averaged, without Flower's processes."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord, RecordDict

pytest.importorskip("fedlane.flower")

from fedlane import ModelError, PeerError, _core
from fedlane.flower import FedAvg, FedlaneGrid
from fedlane.flower.headers import layout_of
from fedlane.handover import Counter, HandoverError, Line


@pytest.fixture
def grid(monkeypatch):
    # It would stay so for the tests that measure memory.
    monkeypatch.setattr("fedlane.flower.grid.keep_freed_memory", lambda: None)
    context = Context(1, 1, {}, RecordDict(), {"fedlane.host": "127.0.0.1", "fedlane.deadline-s": 5.0})
    return FedlaneGrid(object(), context)


def reply(arrays: dict[str, np.ndarray], weight: float = 1.0) -> SimpleNamespace:
    record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
    content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": weight})})
    # Flower's own wants a run.
    return SimpleNamespace(content=content, metadata=SimpleNamespace(src_node_id=1), has_error=lambda: False)


def average(grid: FedlaneGrid, replies: list[SimpleNamespace], weights: list[float]) -> ArrayRecord:
    grid._begin_mean(len(replies))
    return grid.average(replies, weights)[0]


ONES, TWOS = np.ones((40, 50), np.float32), np.full((40, 50), 2, np.float32)


def test_a_mean(grid):
    mean = average(grid, [reply({"a": ONES}), reply({"a": TWOS})], [3.0, 1.0])
    assert np.array_equal(mean["a"].numpy(), np.full((40, 50), 1.25, np.float32))


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_is_none_is_refused_and_not_dropped(grid, weight):
    with pytest.raises(ModelError):
        average(grid, [reply({"a": ONES}), reply({"a": TWOS})], [3.0, weight])


@pytest.mark.parametrize(
    "other",
    [{"b": TWOS, "a": ONES}, {"a": np.asfortranarray(TWOS), "b": TWOS}, {"a": TWOS, "b": TWOS[::-1][:39]}],
    ids=["order", "column-major", "shape"],
)
def test_other_layouts_are_refused_and_nothing_is_kept(grid, other):
    with pytest.raises(ModelError):
        average(grid, [reply({"a": ONES, "b": TWOS}), reply(other)], [1.0, 1.0])
    assert grid._server._local == {}


def test_a_refused_mean_keeps_nothing(grid):
    numbers = ONES.astype(np.complex64)
    with pytest.raises(ModelError):
        average(grid, [reply({"a": numbers}), reply({"a": numbers})], [1.0, 1.0])
    assert grid._server._local == {}


def test_a_round_whose_updates_are_lost_changes_nothing(grid, monkeypatch):
    def lost(*_: object) -> None:
        raise PeerError("told to fail")

    monkeypatch.setattr(grid, "average", lost)
    monkeypatch.setattr(grid, "is_held", lambda _: True)
    fed_avg = FedAvg()
    fed_avg._grid = grid
    assert fed_avg.aggregate_train(1, [reply({"a": ONES})]) == (None, None)


@pytest.mark.parametrize(
    "remark",
    ["[1]", '{"order": 5}', '{"order": [1, "a"]}', '{"fortran": [[1]]}', "[" * 5000, "x"],
    ids=["list", "order", "mixed", "fortran", "deep", "text"],
)
def test_a_header_whose_remark_is_no_remark(remark):
    with pytest.raises(ValueError):
        layout_of(_core.header([("a", "float32", [2])], remark))


def test_another_users_process_is_not_spoken_to(monkeypatch):
    name = f"fedlane-test-{os.getpid()}"
    counter = Counter(name, lambda: lambda request, fd: ({}, None))
    Line.connect(name, 5.0).close()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        Line.connect(name, 5.0)
    counter.close()


def test_who_comes_when_nobody_is_left_hears_so():
    name = f"fedlane-test-left-{os.getpid()}"
    counter = Counter(name, lambda: None)
    with pytest.raises(HandoverError, match="gone"):
        Line.connect(name, 5.0).ask({})
    counter.close()
