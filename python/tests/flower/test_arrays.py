"""Flower's arrays in memory files: what an app sees must be what plain Flower shows it."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlane.flower import arrays
from fedlane.flower.arrays import (
    SMALL_BYTES,
    ArrayNotHere,
    Entry,
    NotCarried,
    adopt,
    gather,
    layout,
    layout_bytes,
    offsets,
    placeholder,
    scatter,
)
from fedlane.flower.memory import CHUNK_BYTES, MAX_MAPPINGS, Arena, Memory

LARGE = 3000  # elements; large for every dtype of 2 bytes or more


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    arrays.install()
    arrays.configure(arena=Arena(), eager=False)
    yield
    arrays.configure(arena=Arena(), eager=False)


def plain(ndarray: np.ndarray) -> Array:
    """The Array that Flower itself makes."""
    original = arrays._originals[Array]["from_numpy_ndarray"].__func__
    array = original(Array, ndarray)
    assert not is_backed(array)
    return array


def plain_numpy(array: Array) -> np.ndarray:
    return arrays._originals[Array]["numpy"](array)


def is_backed(array: Array) -> bool:
    return "_fedlane" in vars(array)


def memory_of(array: Array) -> Memory:
    return vars(array)["_fedlane"].memory


def create(nbytes: int) -> Memory:
    return Memory.create(nbytes)


def numbers(count: int = LARGE, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * 100).astype(dtype)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal to the last bit, in value, type, order and what one may do with it."""
    assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
    assert a.tobytes("A") == b.tobytes("A")
    assert str(a.flags) == str(b.flags) or a.flags.owndata != b.flags.owndata
    assert a.flags.writeable and a.flags.aligned


# What an Array shows


def transposed(a: np.ndarray) -> np.ndarray:
    return a.T


def strided(a: np.ndarray) -> np.ndarray:
    return a[..., ::2] if a.ndim else a


def swapped(a: np.ndarray) -> np.ndarray:
    return a.astype(a.dtype.newbyteorder())


def read_only(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


DTYPES = [
    *arrays.PLAIN_DTYPES,
    "longlong",
    "longdouble",
    "datetime64[s]",
    "timedelta64[ms]",
    "U7",
    "S5",
    "i4,f8",
]
CHANGES = [np.asfortranarray, transposed, strided, swapped, read_only, np.ascontiguousarray, np.asarray]


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.one_of(
        st.sampled_from([(), (0,), (0, 5), (1,), (5000,), (70, 80), (1, 5000), (5000, 1), (17, 1, 300)]),
        st.lists(st.integers(0, 40), max_size=4).map(tuple),
    ),
    change=st.sampled_from(CHANGES),
    seed=st.integers(0, 99),
    eager=st.booleans(),
)
def test_an_array_is_what_flower_makes(
    dtype: str, shape: tuple[int, ...], change: Any, seed: int, eager: bool
) -> None:
    arrays.configure(eager=eager)
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    values = np.random.default_rng(seed).integers(0, 2, count, np.uint8)
    ndarray = change(values.view(kind).reshape(shape) if kind.kind != "U" else np.full(shape, "äb", kind))
    expected, array = plain(ndarray), Array(ndarray)

    assert (array.dtype, array.shape, array.stype) == (expected.dtype, expected.shape, expected.stype)
    assert all(type(size) is int for size in array.shape)
    assert array.data == expected.data and type(array.data) is bytes
    assert array == expected and array.object_id == expected.object_id
    assert array.deflate() == expected.deflate()
    same(array.numpy(), plain_numpy(expected))
    chunks = dict(array.slice_array())
    assert Array.inflate(array.deflate(), chunks) == expected


def test_what_is_large_and_plain_is_backed_and_nothing_else() -> None:
    for dtype, kind in arrays.PLAIN_DTYPES.items():
        assert is_backed(Array(np.zeros(SMALL_BYTES // kind.itemsize, dtype)))
        assert not is_backed(Array(np.zeros(SMALL_BYTES // kind.itemsize - 1, dtype)))
    for dtype in (">f4", "U5", "datetime64[s]", "longdouble", "i4,f8"):
        assert not is_backed(Array(np.zeros(LARGE, dtype)))
    assert not is_backed(Array(np.ma.masked_array(np.zeros(LARGE))))
    assert is_backed(Array(np.zeros((60, 70)).T))


def test_objects_are_refused_as_flower_does() -> None:
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Array(np.full(LARGE, None))
    with pytest.raises(AssertionError, match="Expected NumPy ndarray"):
        Array.from_numpy_ndarray([1.0])
    with pytest.raises(TypeError, match="Invalid arguments"):
        Array(3.0)


def test_an_array_is_a_snapshot() -> None:
    values = numbers()
    before = values.copy()
    array = Array(values)
    values[:] = 0
    same(array.numpy(), before)


@pytest.mark.parametrize("eager", [False, True])
def test_every_numpy_result_is_independent(eager: bool) -> None:
    arrays.configure(eager=eager)
    values = numbers()
    record = ArrayRecord({"a": Array(values), "b": Array(values)})
    alias = ArrayRecord(dict(record))
    first, second = record["a"].numpy(), record["a"].numpy()
    neighbour, aliased = record["b"].numpy(), alias["a"].numpy()
    first += 1
    second[:] = 7
    same(neighbour, values)
    same(aliased, values)
    same(record["a"].numpy(), values)
    assert record["a"].data == plain(values).data
    neighbour[:] = 3
    same(first, values + 1)
    assert np.all(second == 7)


def test_a_view_that_outlives_everything_keeps_its_bytes() -> None:
    values = numbers(100_000)
    view = Array(values).numpy()[50:]
    arrays.configure(arena=Arena())
    gc.collect()
    Array(np.zeros(200_000, np.float32))
    same(np.asarray(view), values[50:].copy())


def test_an_array_made_after_a_neighbour_was_written_to_is_whole() -> None:
    # Both share a page: a mapping in which the first was written to does not show the second.
    kept = []
    for i in range(3 * MAX_MAPPINGS):
        values = numbers(1500, seed=i)
        view = Array(values).numpy()
        same(view, values)
        view[:] = -1
        kept.append(view)
    assert all(np.all(view == -1) for view in kept)


def test_many_views_of_one_array_do_not_take_a_mapping_each() -> None:
    array = Array(numbers(100_000))
    before = maps()
    views = [array.numpy() for _ in range(200)]
    assert maps() - before <= 2 * MAX_MAPPINGS
    for i, view in enumerate(views):
        view[0] = i
    assert [view[0] for view in views] == list(range(200))


def test_without_file_descriptors_views_are_copies() -> None:
    array = Array(numbers())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        view = array.numpy()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    same(view, numbers())


def test_setting_data_replaces_the_bytes() -> None:
    array, other = Array(numbers()), plain(numbers(seed=1))
    old_id = array.object_id
    array.data = other.data
    assert array.data is other.data and not is_backed(array)
    assert array.object_id != old_id and array.is_dirty is False
    same(array.numpy(), plain_numpy(other))
    array.stype = "mine"
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        array.numpy()
    backed = Array(numbers())
    backed.stype = "mine"
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        backed.numpy()


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, *(lambda a, p=p: pickle.loads(pickle.dumps(a, p)) for p in range(6))]
)
def test_copies_and_pickles_are_equal_and_separate(change: Any) -> None:
    record = ArrayRecord({"a": Array(numbers()), "small": Array(np.array(3.0))})
    record["a"].slice_array()  # caches views, which cannot be pickled; nothing of it may be kept
    assert change(record) == record
    for original in record.values():
        new = change(original)
        assert new == original and new is not original and new.object_id == original.object_id
        new.data = b"other"
        assert original.data != b"other"
    same(change(record["a"]).numpy(), numbers())


def test_a_pickle_is_read_by_a_process_without_fedlane() -> None:
    record = ArrayRecord({"a": Array(numbers())})
    code = (
        "import pickle, sys; record = pickle.load(sys.stdin.buffer);"
        "assert 'fedlane' not in sys.modules; print(record['a'].numpy().sum(dtype='f8'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(record), capture_output=True, check=True
    )
    assert float(done.stdout) == numbers().sum(dtype="f8")


# Records


def test_records_are_what_flower_makes() -> None:
    ndarrays = [numbers(seed=1), np.array(2.5), np.zeros((0, 3)), numbers(5000, np.float16), np.arange(3)]
    expected = ArrayRecord()
    for i, ndarray in enumerate(ndarrays):
        expected[str(i)] = plain(ndarray)
    for record in (
        ArrayRecord(ndarrays),
        ArrayRecord(list(ndarrays), keep_input=False),
        ArrayRecord({str(i): Array(a) for i, a in enumerate(ndarrays)}),
        ArrayRecord({str(i): plain(a) for i, a in enumerate(ndarrays)}, keep_input=False),
    ):
        assert list(record) == list(expected) and record == expected
        assert record.object_id == expected.object_id and record.count_bytes() == expected.count_bytes()
        for got, want in zip(record.to_numpy_ndarrays(), expected.values(), strict=True):
            same(got, plain_numpy(want))
        assert is_backed(record["0"]) == is_backed(record["3"])
        taken = record.to_numpy_ndarrays(keep_input=False)
        assert len(record) == 0 and len(taken) == len(ndarrays)
        taken[0][:] = 0
    same(ndarrays[0], numbers(seed=1))


def test_keep_input_false_empties_the_input() -> None:
    ndarrays, array_dict = [numbers()], {"a": Array(numbers())}
    ArrayRecord(ndarrays, keep_input=False)
    ArrayRecord(array_dict, keep_input=False)
    assert ndarrays == [] and array_dict == {}


def test_a_record_made_from_a_dict_shares_the_bytes() -> None:
    array = Array(numbers())
    record = ArrayRecord({"a": array, "tied": array})
    assert vars(record["a"])["_fedlane"] is vars(record["tied"])["_fedlane"] is vars(array)["_fedlane"]
    assert record["a"] is not array


# Moving records


NAMES = st.text(max_size=8)
MIXED = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(list(arrays.PLAIN_DTYPES)),
        st.sampled_from([(), (0,), (3,), (4095,), (4097,), (65, 70), (0, 9), (513, 9)]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda item: item[0],
)


@settings(max_examples=150, deadline=None)
@given(items=MIXED, as_dict=st.booleans(), adopting=st.booleans())
def test_a_record_arrives_as_it_was_sent(items: list[Any], as_dict: bool, adopting: bool) -> None:
    sent = ArrayRecord()
    for i, (name, dtype, shape, fortran, flower) in enumerate(items):
        ndarray = numbers(int(np.prod(shape)), seed=i).astype(dtype).reshape(shape)
        ndarray = np.asfortranarray(ndarray) if fortran else ndarray
        sent[name] = plain(ndarray) if flower else Array(ndarray)
    sent = ArrayRecord(dict(sent)) if as_dict else sent
    expected = {name: array.data for name, array in sent.items()}
    sent_id = sent.object_id

    memory, offset, entries = gather(sent, create, adopt=adopting)
    assert (entries, layout_bytes(entries)) == layout(sent)
    wire = memory.read(offset, layout_bytes(entries))
    received = scatter(written(wire), 64, json.loads(json.dumps(entries)))

    assert list(received) == list(expected)
    assert {name: array.data for name, array in received.items()} == expected
    assert {name: array.data for name, array in sent.items()} == expected
    assert received == sent and received.object_id == sent_id == sent.object_id
    for name, array in received.items():
        assert (array.dtype, array.shape, array.stype) == (
            sent[name].dtype,
            sent[name].shape,
            sent[name].stype,
        )
        same(array.numpy(), sent[name].numpy())
    again = gather(received, create)
    assert again[0].read(again[1], len(wire)) == wire and again[2] == entries


def written(content: bytes) -> Memory:
    """Memory that came from elsewhere, with something else before and behind the record."""
    memory = Memory.create(len(content) + 128)
    memory.append(b"x" * 64 + content + b"y" * 64)
    return Memory.adopt(os.dup(memory.fd), memory.nbytes)


def test_bytes_stand_large_first_then_small_without_holes() -> None:
    entries = [
        Entry("s", "float64", ()),
        Entry("a", "int8", (5001,)),
        Entry("t", "bool", (3,)),
        Entry("b", "float32:F", (50, 50)),
    ]
    assert offsets(entries) == [15001, 0, 15009, 5001]
    assert layout_bytes(entries) == 15012


def test_a_record_as_apps_make_it_is_not_copied() -> None:
    def refuse(nbytes: int) -> Memory:
        raise AssertionError("copied")

    values = [numbers(), np.array(1.0), numbers(40_000, np.float64), np.arange(5)]
    by_list = ArrayRecord(values)
    by_dict = ArrayRecord({str(i): Array(v) for i, v in enumerate(values)})
    by_item = ArrayRecord()
    for i, v in enumerate(values):
        by_item[str(i)] = Array(v)
    for record in (by_list, by_dict, by_item):
        memory, offset, entries = gather(record, refuse)
        assert memory is memory_of(record["0"]) and memory.fd == memory_of(record["2"]).fd
        assert offset == vars(record["0"])["_fedlane"].offset and offset % 64 == 0
        # For K clients, and wrapped again: the same place, and nothing is added.
        used = memory.used
        assert gather(record, refuse)[:2] == (memory, offset)
        assert gather(ArrayRecord(dict(record)), refuse)[:2] == (memory, offset)
        assert memory.used == used
        # Forwarded as received: no copy either.
        received = scatter(memory, offset, entries)
        assert gather(received, refuse)[:2] == (memory, offset)
        assert memory_of(received["2"]) is memory
    assert memory_of(by_list["0"]) is memory_of(by_item["0"]), "small records share one memory"


def test_a_large_record_has_its_own_memory_when_its_size_is_known() -> None:
    one = numbers(CHUNK_BYTES // 3 // 4)
    record = ArrayRecord([one, one, one, one])
    assert len({memory_of(array).fd for array in record.values()}) == 1
    assert gather(record, Memory.create)[0] is memory_of(record["0"])
    assert memory_of(Array(numbers())) is not memory_of(record["0"])
    # A dict says nothing beforehand: the first is copied, and the arena knows the next one.
    arrays.configure(arena=Arena())
    first = ArrayRecord({str(i): Array(one) for i in range(4)})
    assert gather(first, create)[0] is not memory_of(first["0"])
    second = ArrayRecord({str(i): Array(one) for i in range(4)})
    assert gather(second, create)[0] is memory_of(second["0"])
    arrays.configure(arena=Arena())
    arrays.arena().expect(layout(first)[1])
    third = ArrayRecord({str(i): Array(one) for i in range(4)})
    assert gather(third, create)[0] is memory_of(third["0"])


def test_changed_order_and_foreign_arrays_are_copied() -> None:
    a, b = Array(numbers(seed=1)), Array(numbers(seed=2))
    record = ArrayRecord()
    record["b"], record["a"] = b, a
    memory, offset, entries = gather(record, create)
    assert memory is not memory_of(a)
    received = scatter(memory, offset, entries)
    assert list(received) == ["b", "a"] and received == record


def odd_arrays() -> dict[str, Array]:
    npy = plain(numbers()).data
    relabelled = Array(numbers())
    relabelled.dtype = "int32"
    other_stype = Array(numbers())
    other_stype.stype = "mine"
    return {
        "unknown stype": Array("float32", (2,), "pickle", b"xx"),
        "no dtype": Array("", (), "numpy.ndarray", npy),
        "other shape": Array("float32", (1, LARGE), "numpy.ndarray", npy),
        "short": Array("float32", (LARGE,), "numpy.ndarray", npy[:-1]),
        "long": Array("float32", (LARGE,), "numpy.ndarray", npy + b"x"),
        "no header": Array("float32", (-1,), "numpy.ndarray", b""),
        "objects": Array("object", (1,), "numpy.ndarray", b"x" * 200),
        "short raw": Array("bfloat16", (3,), arrays.RAW_STYPE, b"xx"),
        "byte order": Array(numbers(dtype=">f4")),
        "relabelled": relabelled,
        "other stype": other_stype,
    }


@pytest.mark.parametrize(
    "kind",
    [
        "unknown stype",
        "no dtype",
        "other shape",
        "short",
        "long",
        "no header",
        "objects",
        "short raw",
        "byte order",
        "relabelled",
        "other stype",
    ],
)
def test_what_is_not_plain_is_not_carried(kind: str) -> None:
    array = odd_arrays()[kind]
    record = ArrayRecord()
    record["first"], record["the odd one"] = Array(numbers()), array
    wrapped = ArrayRecord(dict(record))
    assert wrapped["the odd one"] == array
    for function in (layout, lambda r: gather(r, create)):
        for r in (record, wrapped):
            with pytest.raises(NotCarried, match="the odd one"):
                function(r)


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "float32", (1 << 60, 1 << 60))],
        [("a", "float32", (-1,))],
        [("a", "float32", (True,))],
        [("a", "float32", ("3",))],
        [("a", "float32", (1,) * 65)],
        [("a", "object", (1,))],
        [("a", "float32:F:F", (1,))],
        [("a", 7, (1,))],
        [(7, "float32", (1,))],
        [("a", "float32", (1,)), ("a", "float32", (1,))],
        [("a", "int8", (5000,)), ("b", "int8", (5000,))],
    ],
)
def test_a_bad_layout_is_refused(entries: Any) -> None:
    with pytest.raises(ValueError):
        scatter(Memory.create(9999), 0, entries)
    with pytest.raises(ValueError):
        scatter(Memory.create(9999), -8, [("a", "int8", (1,))])


def test_adopt_frees_flowers_bytes_and_keeps_the_content() -> None:
    record = ArrayRecord()
    record["a"], record["s"], record["f"] = plain(numbers()), plain(np.array(1)), plain(np.ones((60, 80)).T)
    expected, object_id = {k: v.data for k, v in record.items()}, record.object_id
    memory, offset, entries = gather(record, create)
    assert not is_backed(record["a"])
    adopt(record, memory, offset, entries)
    assert is_backed(record["a"]) and is_backed(record["f"]) and "data" not in vars(record["a"])
    assert {k: v.data for k, v in record.items()} == expected and record.object_id == object_id
    assert gather(record, create)[:2] == (memory, offset)
    record["a"] = Array(numbers(10))
    with pytest.raises(ValueError, match="gather it again"):
        adopt(record, memory, offset, entries)


# Placeholders


def test_a_placeholder_says_what_to_do_and_breaks_nothing_else() -> None:
    record = ArrayRecord({"w": placeholder("w", "float32", (4, 5), "use the aggregate of this round")})
    array = record["w"]
    assert (array.dtype, array.shape, array.stype) == ("float32", (4, 5), "numpy.ndarray")
    for read in (
        lambda: array.data,
        array.numpy,
        lambda: len(array.data),
        lambda: gather(record, create),
        lambda: array.object_id,
    ):
        with pytest.raises(ArrayNotHere, match="array 'w' is not here: use the aggregate of this round"):
            read()
    content = RecordDict({"arrays": record})
    assert "use the aggregate" in repr(content)
    for other in (pickle.loads(pickle.dumps(content)), copy.deepcopy(content), copy.copy(content)):
        with pytest.raises(ArrayNotHere, match="use the aggregate"):
            other["arrays"]["w"].numpy()
    array.data = plain(numbers(20).reshape(4, 5)).data
    same(array.numpy(), numbers(20).reshape(4, 5))


# bfloat16 and float8


RAW_ML = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", RAW_ML)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (90, 100)])
def test_ml_dtypes_keep_their_bits(dtype: str, shape: tuple[int, ...]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kind = np.dtype(getattr(ml_dtypes, dtype))
    values = (
        np.random.default_rng(1)
        .integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
        .view(kind)
        .reshape(shape)
    )
    array = Array(values)
    assert (array.dtype, array.shape, array.stype) == (dtype, shape, "fedlane.raw")
    assert is_backed(array) == (values.nbytes >= SMALL_BYTES)
    pickled = pickle.dumps(
        array
    )  # now: Flower's Array has views, which cannot be pickled, once it was deflated
    inflated = Array.inflate(array.deflate(), dict(array.slice_array()))
    memory, offset, entries = gather(ArrayRecord({"a": array}), create)
    for other in (array, inflated, pickle.loads(pickled), scatter(memory, offset, entries)["a"]):
        got = other.numpy()
        assert got.dtype == kind and got.shape == shape and got.tobytes() == values.tobytes() == other.data
        assert got.flags.writeable
        assert other == array and other.object_id == array.object_id
    plain_way = arrays._originals[Array]["numpy"]
    with pytest.raises(TypeError, match=r"fedlane\.raw"):
        plain_way(inflated)


def test_bfloat16_without_ml_dtypes_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    array = Array("bfloat16", (2,), arrays.RAW_STYPE, b"1234")
    with pytest.raises(TypeError, match="bfloat16, which NumPy does not have: install"):
        array.numpy()
    with pytest.raises(TypeError, match="cannot have 3 raw bytes"):
        Array("bfloat16", (2,), arrays.RAW_STYPE, b"123").numpy()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip(
        "torch", reason="torch is not installed: bfloat16 and float8 tensors are not tested"
    )


def test_torch_state_dicts_come_back(torch: Any) -> None:
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(50, 60).to(torch.bfloat16),
        "bf16 small": torch.randn(3).to(torch.bfloat16),
        "bf16 0-d": torch.tensor(1.5, dtype=torch.bfloat16),
        "bf16 empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "bf16 odd": torch.randn(4097).to(torch.bfloat16).t(),
        "f32": torch.randn(40, 50).t(),
        "i64": torch.tensor(7),
        "bool": torch.ones(5000, dtype=torch.bool),
        "f16": torch.randn(2500).half(),
        "grad": torch.randn(2000, requires_grad=True),
    }
    for name in ("float8_e4m3fn", "float8_e5m2"):
        if hasattr(torch, name):
            tensors[name] = torch.randn(5000).to(getattr(torch, name))
    for eager in (False, True):
        arrays.configure(eager=eager)
        record = ArrayRecord(tensors)
        memory, offset, entries = gather(record, create)
        assert memory is memory_of(record["bf16"])
        received = scatter(memory, offset, entries)
        for other in (record, received, pickle.loads(pickle.dumps(received))):
            state = other.to_torch_state_dict()
            assert type(state).__name__ == "OrderedDict" and list(state) == list(tensors)
            for name, tensor in tensors.items():
                assert state[name].dtype == tensor.dtype and state[name].shape == tensor.shape
                assert torch.equal(state[name], tensor.detach())
            state["bf16"].zero_()
            state["bf16 small"].zero_()
            assert torch.equal(other.to_torch_state_dict(keep_input=False)["bf16"], tensors["bf16"])
            assert len(other) == 0
    kept = dict(tensors)
    ArrayRecord(kept, keep_input=False)
    assert kept == {}
    assert Array(tensors["f32"]) == plain(tensors["f32"].numpy())


# Memory files


def test_a_short_file_is_refused_and_stays_with_the_caller() -> None:
    memory = Memory.create(100)
    fd = os.dup(memory.fd)
    with pytest.raises(ValueError, match="has 100 bytes, 101 were announced"):
        Memory.adopt(fd, 101)
    os.close(fd)
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 50)  # nobody can shorten it under a mapping


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 70])
def test_lack_of_memory_is_an_error(nbytes: int) -> None:
    with pytest.raises(MemoryError, match=str(nbytes)):
        Memory.create(nbytes)
    for bad in (0, -1):
        with pytest.raises(ValueError):
            Memory.create(bad)


def test_an_allocator_without_memory_loses_nothing() -> None:
    def nothing(nbytes: int) -> Memory:
        raise MemoryError("the pool is empty")

    arrays.configure(arena=Arena(nothing))
    with pytest.raises(MemoryError, match="the pool is empty"):
        Array(numbers())
    arrays.configure(arena=Arena(lambda nbytes: Memory.create(10)))
    with pytest.raises(MemoryError, match="got 10"):
        Array(numbers())


def new_file(nbytes: int) -> int:
    memory = Memory.create(nbytes)
    return os.dup(memory.fd)


def test_memory_goes_back_to_its_pool_when_the_last_view_is_gone() -> None:
    returned: list[int] = []
    fd = new_file(100_000)
    memory = Memory.adopt(fd, 100_000, returned.append)
    record = scatter(memory, 0, [("a", "float32", (20_000,))])
    view = record["a"].numpy()[5:]
    whole = np.asarray(memory.shared()).view(np.float32)
    del record, memory
    gc.collect()
    assert returned == []
    del whole
    assert returned == []
    del view
    assert returned == [fd]
    os.close(fd)


def test_memory_of_a_pool_is_written_through_its_mapping() -> None:
    import mmap

    fd = new_file(CHUNK_BYTES)
    mapping = mmap.mmap(fd, CHUNK_BYTES)
    arrays.configure(arena=Arena(lambda nbytes: Memory.adopt(fd, nbytes, mapping=mapping)))
    record = ArrayRecord([numbers(), np.array(1.0)])
    memory, offset, entries = gather(record, create)
    assert bytes(mapping[:12]) == numbers()[:3].tobytes()
    same(scatter(memory, offset, entries)["0"].numpy(), numbers())


def test_private_and_shared_mappings() -> None:
    memory = Memory.create(10_000)
    memory.append(bytes(range(250)) * 40)
    private, other, shared = memory.private(), memory.private(), memory.shared()
    private[0] = 99
    assert other[0] == shared[0] == 0 and memory.shared() is shared
    shared[5000] = 77
    assert memory.read(5000, 1) == b"M"
    assert memory.append(b"x") is None and memory.used == 10_000


def test_a_forked_child_leaves_its_parents_memory_and_pool_alone() -> None:
    parent = os.getpid()

    def pool(nbytes: int) -> Memory:
        return Memory.create(nbytes, sparse=True) if os.getpid() == parent else pytest.fail("not the child's")

    arrays.configure(arena=Arena(pool))
    record = ArrayRecord()
    record["a"], record["small"] = Array(numbers()), Array(np.array(1.0))
    used = memory_of(record["a"]).used
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Array(numbers(seed=5))
            memory, _, _ = gather(record, create)
            if memory is not memory_of(record["a"]) and np.array_equal(record["a"].numpy(), numbers()):
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert memory_of(record["a"]).read(used, 8) == bytes(8)
    assert gather(record, create)[0] is memory_of(record["a"])


def test_threads_make_and_read_arrays_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(60):
                values = numbers(1500 + 37 * i, seed=seed * 1000 + i)
                record = ArrayRecord([values, np.array(seed)])
                memory, offset, entries = gather(record, create)
                view = scatter(memory, offset, entries)["0"].numpy()
                same(view, values)
                view[:] = seed
                mine = record["0"].numpy()
                same(mine, values)
                mine[:] = seed
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def maps() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:fedlane" in line for line in file)


def files() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:fedlane" in link for link in links)


def test_a_hundred_rounds_leave_nothing_behind() -> None:
    def one_round(i: int) -> None:
        record = ArrayRecord({"w": Array(numbers(300_000, seed=i)), "b": Array(np.array(i))})
        memory, offset, entries = gather(record, create)
        received = [
            scatter(Memory.adopt(os.dup(memory.fd), memory.nbytes), offset, entries) for _ in range(3)
        ]
        mean = sum(r["w"].numpy() for r in received) / 3
        received[0]["w"].numpy()[:] = 0
        pickle.dumps(received[1])
        ArrayRecord([mean])

    gc.collect()
    gc.disable()  # memory must not wait for the collector
    try:
        arrays.configure(arena=Arena())
        base = (files(), maps())
        for i in range(100):
            one_round(i)
            arrays.configure(arena=Arena())
            assert (files(), maps()) == base, f"after round {i}"
    finally:
        gc.enable()


def test_adopting_holds_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, nbytes = 6, 40 << 20
    record = ArrayRecord()
    for i in range(count):
        record[str(i)] = plain(np.full(nbytes // 4, i, np.float32))
    peak = 0
    append = Memory.append

    def watched(self: Memory, payload: Any, at: int | None = None) -> int | None:
        nonlocal peak
        result = append(self, payload, at)
        peak = max(peak, anonymous_bytes() + os.fstat(self.fd).st_blocks * 512)
        return result

    monkeypatch.setattr(Memory, "append", watched)
    before = anonymous_bytes()
    gather(record, lambda n: Memory.create(n, sparse=True), adopt=True)
    assert peak - before < 1.6 * nbytes, "the model and one array"
    assert anonymous_bytes() < before - (count - 0.5) * nbytes
    assert record["5"].numpy()[-1] == 5


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_arrays_beyond_2_gib() -> None:
    from fedlane.flower.memory import _available_bytes

    nbytes = (2 << 30) + 4096
    if (_available_bytes() or 0) < 3 * nbytes:
        pytest.skip("needs 6 GiB of memory")
    values = np.zeros(nbytes, np.uint8)
    values[-3:] = (1, 2, 3)
    array = Array(values)
    del values
    memory, offset, entries = gather(ArrayRecord({"a": array}), create)
    view = scatter(memory, offset, entries)["a"].numpy()
    assert view[-3:].tolist() == [1, 2, 3] and view.nbytes == nbytes and memory is memory_of(array)
    arrays.configure(eager=True)
    assert array.numpy()[-3:].tolist() == [1, 2, 3]


# Installing


# fedlane.flower without what importing it does: that installs.
BARE = """
import sys, types, fedlane
package = types.ModuleType("fedlane.flower")
package.__path__ = [fedlane.__path__[0] + "/flower"]
sys.modules["fedlane.flower"] = package
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BARE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_unknown_flower_is_refused_by_version_and_left_alone() -> None:
    run(
        "from flwr.app import Array, ArrayRecord\n"
        "from importlib.metadata import version\n"
        "from fedlane.flower import arrays\n"
        "original = Array.numpy\n"
        "del ArrayRecord.count_bytes\n"
        "try:\n    arrays.install()\n"
        "except arrays.UnknownFlower as error:\n"
        "    assert f'flwr {version(\"flwr\")}: ArrayRecord.count_bytes is missing' in str(error), error\n"
        "else:\n    raise SystemExit('installed')\n"
        "assert Array.numpy is original and 'data' not in vars(Array)\n"
    )


def test_a_flower_that_goes_another_way_is_put_back() -> None:
    run(
        "from flwr.app import Array, ArrayRecord\n"
        "from fedlane.flower import arrays\n"
        "make = Array.from_numpy_ndarray\n"
        "init = Array.__init__\n"
        "def __init__(self, *args, **kwargs):\n"
        "    init(self, *args, **kwargs) if kwargs else vars(self).update(vars(make(*args)))\n"
        "Array.__init__ = __init__\n"
        "before = dict(vars(Array))\n"
        "try:\n    arrays.install()\n"
        "except arrays.UnknownFlower as error:\n    assert 'goes another way' in str(error), error\n"
        "else:\n    raise SystemExit('installed')\n"
        "assert dict(vars(Array)) == before\n"
    )


def test_names_imported_before_and_installing_at_once() -> None:
    run(
        "import threading\nimport numpy as np\n"
        "from flwr.app import Array, ArrayRecord\n"
        "old = Array(np.arange(5000.0))\n"
        "from fedlane.flower import arrays\n"
        "threads = [threading.Thread(target=arrays.install) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "new = Array(np.arange(5000.0))\n"
        "assert '_fedlane' in vars(new) and new == old and (old.numpy() == new.numpy()).all()\n"
        "assert ArrayRecord({'a': old}) == ArrayRecord({'a': new})\n"
    )


# Flower's strategies


def strategies() -> dict[str, Any]:
    from flwr.serverapp import strategy as s

    few = {"min_train_nodes": 2, "min_evaluate_nodes": 2, "min_available_nodes": 2}
    dp = {"noise_multiplier": 0.3, "num_sampled_clients": 7}
    return {
        "FedAvg": s.FedAvg(**few),
        "FedProx": s.FedProx(proximal_mu=0.1, **few),
        "FedAvgM": s.FedAvgM(server_learning_rate=0.7, server_momentum=0.9, **few),
        "FedAdam": s.FedAdam(**few),
        "FedYogi": s.FedYogi(**few),
        "FedAdagrad": s.FedAdagrad(**few),
        "FedMedian": s.FedMedian(**few),
        "FedTrimmedAvg": s.FedTrimmedAvg(beta=0.2, **few),
        "Krum": s.Krum(num_malicious_nodes=1, **few),
        "MultiKrum": s.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3, **few),
        "Bulyan": s.Bulyan(num_malicious_nodes=1, **few),
        "QFedAvg": s.QFedAvg(client_learning_rate=0.1, q=0.2, train_loss_key="loss", **few),
        "DPServerFixed": s.DifferentialPrivacyServerSideFixedClipping(
            s.FedAvg(**few), clipping_norm=1.0, **dp
        ),
        "DPServerAdaptive": s.DifferentialPrivacyServerSideAdaptiveClipping(s.FedAvg(**few), **dp),
        "DPClientFixed": s.DifferentialPrivacyClientSideFixedClipping(
            s.FedAvg(**few), clipping_norm=1.0, **dp
        ),
        "DPClientAdaptive": s.DifferentialPrivacyClientSideAdaptiveClipping(s.FedAvg(**few), **dp),
    }


class Nodes:
    """As much of a Grid as a strategy needs to sample nodes."""

    def get_node_ids(self) -> list[int]:
        return [1, 2, 3, 4, 5, 6, 7]


def model(seed: int) -> list[np.ndarray]:
    return [
        numbers(7001, seed=seed),
        numbers(33, seed=seed + 1),
        np.asfortranarray(numbers(5600, np.float64, seed + 2).reshape(70, 80)),
        np.array(0.5 + seed),
        numbers(5001, np.float16, seed + 3) / np.float16(100),
        numbers(4096, np.int64, seed + 4),
    ]


def client(instruction: Message, moved: bool) -> Message:
    """Train a little, in place where that is possible, and reply; by way of memory if `moved`."""
    node = instruction.metadata.dst_node_id
    record = next(iter(instruction.content.array_records.values()))
    if moved:
        record = scatter(*gather(record, create))
    trained = record.to_numpy_ndarrays()
    for i, array in enumerate(trained):
        array += numbers(array.size, array.dtype, node * 50 + i).reshape(array.shape) // 7
    reply = ArrayRecord(trained)
    if moved:
        reply = scatter(*gather(reply, create))
    metrics = MetricRecord({"num-examples": 10 + node, "loss": 0.5 * node, "norm_bit": node % 2})
    return Message(RecordDict({"arrays": reply, "metrics": metrics}), reply_to=instruction)


def name_this_process() -> None:
    """Newer versions of Flower make messages only in a process that runs an app."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


def layers(strategy: str) -> int:
    """How much of the model Flower itself can take: some multiply integers in place, or overflow float16."""
    if strategy == "QFedAvg":
        return 4
    return 5 if strategy.startswith("DP") else 6


def run_strategies(moved: bool) -> dict[str, Any]:
    """Three rounds of every strategy: what the model is after each, as digests of Flower's bytes."""
    import random

    name_this_process()
    result = {}
    for name, strategy in strategies().items():
        random.seed(1)
        np.random.seed(1)
        current = ArrayRecord(model(0)[: layers(name)])
        result[name] = []
        for server_round in (1, 2, 3):
            messages = strategy.configure_train(server_round, current, ConfigRecord(), Nodes())
            messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
            aggregated, _ = strategy.aggregate_train(server_round, [client(m, moved) for m in messages])
            assert aggregated is not None, name
            assert not moved or any(is_backed(array) for array in aggregated.values()), name
            assert all(np.all(np.isfinite(array)) for array in aggregated.to_numpy_ndarrays()), name
            assert aggregated != current, name
            current = aggregated
            result[name].append(
                [(k, a.dtype, a.shape, hashlib.sha256(a.data).hexdigest()) for k, a in current.items()]
            )
    return result


@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_every_strategy_gives_the_same_bits(how: str) -> None:
    got = strategies_in_a_process(how)
    want = strategies_in_a_process("plain")
    assert set(got) == set(want) and len(got) == 16
    for name in want:
        assert got[name] == want[name], name


def strategies_in_a_process(how: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1] != "plain":
        arrays.install()
        arrays.configure(eager=sys.argv[1] == "eager")
    print(json.dumps(run_strategies(sys.argv[1] != "plain")))
