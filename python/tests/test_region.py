"""Regions and the views of them."""

import gc
import mmap
import os
import sys

import fedlane
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NATIVE = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64",
]  # fmt: skip
EXTENDED = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if name in EXTENDED else name)


def random_array(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits, but for bool, which has two values."""
    dtype = numpy_dtype(name)
    high = 2 if name == "bool" else 256
    count = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NATIVE + EXTENDED)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_have_dtype_and_shape_and_share_the_bits(name, shape):
    array = random_array(name, shape)
    region = fedlane.Region.from_arrays({"other": np.ones(3, np.uint8), "x": array})
    assert region.dtype("x") == name
    assert region.shape("x") == shape
    view = region.numpy("x")
    assert view.dtype == numpy_dtype(name)
    assert view.shape == shape
    assert view.tobytes() == array.tobytes()
    assert view.flags.writeable
    view[...] = np.zeros((), view.dtype)
    assert region.numpy("x").tobytes() == bytes(array.nbytes)


@pytest.mark.parametrize(
    ("numpy_name", "file_name"),
    [("float32", "F32"), ("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("bool", "BOOL")],
)
def test_both_spellings_of_a_dtype(numpy_name, file_name):
    region = fedlane.Region({"a": (numpy_name, (2,)), "b": (file_name, [2])})
    assert region.dtype("a") == region.dtype("b") == numpy_name


def test_views_alias_both_ways():
    region = fedlane.Region({"w": ("float32", (4,))})
    one, two, buffer = region.numpy("w"), region.numpy("w"), memoryview(region)
    one[2] = 5
    assert two[2] == 5
    buffer[0:4] = np.float32(7).tobytes()
    assert one[0] == 7


def test_the_buffer_is_the_whole_data():
    region = fedlane.Region.from_arrays({"a": np.arange(5, dtype=np.int16)})
    buffer = memoryview(region)
    assert (buffer.nbytes, buffer.format, buffer.ndim, buffer.readonly) == (10, "B", 1, False)
    assert bytes(buffer) == np.arange(5, dtype=np.int16).tobytes()
    assert len(memoryview(fedlane.Region({}))) == 0


def test_the_file_can_be_mapped():
    region = fedlane.Region({"w": ("uint8", (5000,))})
    with mmap.mmap(region.fileno(), 5000) as mapped:
        mapped[4999] = 9
        assert region.numpy("w")[4999] == 9
        region.numpy("w")[0] = 3
        assert mapped[0] == 3


def test_views_keep_the_memory():
    region = fedlane.Region({"w": ("float32", (1 << 20,))})
    view, part, buffer = region.numpy("w"), region.numpy("w")[5:9], memoryview(region)
    foreign = np.from_dlpack(region.dlpack("w"))
    view[:] = 3
    descriptor = region.fileno()
    del region, view
    gc.collect()
    assert part.sum() == 12
    del part
    assert buffer[0:4].tobytes() == np.float32(3).tobytes()
    buffer.release()
    del buffer
    gc.collect()
    assert foreign.sum() == 3 << 20
    del foreign
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_layout_does_not_depend_on_the_order_of_the_mapping():
    tensors = {"z": ("float32", (3,)), "a": ("uint8", (3,)), "m": ("int64", ()), "b": ("float32", (1,))}
    region = fedlane.Region(tensors)
    assert region.names == ["m", "b", "z", "a"]
    assert fedlane.Region(dict(reversed(tensors.items()))).names == region.names
    assert region.bytes == 8 + 4 + 12 + 3


def test_only_the_order_of_bytes_is_converted():
    region = fedlane.Region.from_arrays({"x": np.arange(4, dtype=">f4")})
    assert region.numpy("x").tolist() == [0, 1, 2, 3]
    strided = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert (fedlane.Region.from_arrays({"x": strided}).numpy("x") == strided).all()


def test_without_ml_dtypes_the_error_says_what_to_install(monkeypatch):
    region = fedlane.Region({"x": ("bfloat16", (2,)), "y": ("float8_e5m2", ()), "z": ("float32", ())})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for name in "x", "y":
        with pytest.raises(ImportError, match=f'"{name}".*pip install ml_dtypes'):
            region.numpy(name)
    assert region.numpy("z").shape == ()


def test_packed_dtypes_travel_but_have_no_arrays():
    region = fedlane.Region({"x": ("F4", (4,))})
    assert (region.bytes, region.dtype("x")) == (2, "float4_e2m1fn")
    with pytest.raises(fedlane.ModelError, match='"x" is float4'):
        region.numpy("x")
    with pytest.raises(BufferError, match="packed"):
        np.from_dlpack(region.dlpack("x"))


def test_metadata():
    region = fedlane.Region({}, metadata={"format": "pt", "ü": "\n"})
    assert region.metadata == {"format": "pt", "ü": "\n"}
    assert fedlane.Region({}).metadata == {}
    assert "0 tensors, 0 bytes" in repr(region)


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"x": ("float33", ())}, fedlane.ModelError, '"x".*"float33".*float32'),
        ({"x": ("float32", (-1,))}, TypeError, '"x".*shape'),
        ({"x": ("float32", 3)}, TypeError, '"x".*shape'),
        ({"x": ("float32", (1.5,))}, TypeError, '"x".*shape'),
        ({"x": ("float32", (2**80,))}, TypeError, '"x".*shape'),
        ({"x": ("float32", (2**40, 2**40))}, fedlane.ModelError, '"x".*overflow'),
        ({"x": ("float32", (2**50,))}, fedlane.ModelError, "above the limit"),
        ({"x": ("uint8", (2**42,))}, fedlane.OutOfMemory, "region of"),
        ({"x": ("float32", (1,) * 65)}, fedlane.ModelError, "dimensions"),
        ({"x": "float32"}, TypeError, "dtype, shape"),
        ({"x": ("float32",)}, TypeError, "dtype, shape"),
        ({"x": 1}, TypeError, "dtype, shape"),
        ({1: ("float32", ())}, TypeError, "name"),
        ({"__metadata__": ("float32", ())}, fedlane.ModelError, "reserves"),
        ({"x" * 5000: ("float32", ())}, fedlane.ModelError, "5000 bytes"),
        ([("x", ("float32", ()))], TypeError, "list"),
        (None, TypeError, "None"),
    ],
)
def test_bad_descriptions(tensors, error, text):
    with pytest.raises(error, match=text):
        fedlane.Region(tensors)


@pytest.mark.parametrize("value", [1.5, "text", [1, 2], None, np.array(["a"]), np.array([None])])
def test_values_that_are_no_arrays(value):
    with pytest.raises((TypeError, fedlane.ModelError)):
        fedlane.Region.from_arrays({"x": value})


@pytest.mark.parametrize("method", ["dtype", "shape", "numpy", "dlpack"])
def test_names_that_are_missing(method):
    with pytest.raises(KeyError, match="nowhere"):
        getattr(fedlane.Region({}), method)("nowhere")


DESCRIPTION = st.tuples(
    st.sampled_from(NATIVE + ["BF16", "F4", "F6_E2M3", "nonsense", ""]),
    st.lists(st.integers(-1, 9) | st.integers(2**45, 2**66), max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=8), DESCRIPTION, max_size=5))
def test_any_description_makes_a_region_or_an_error(tensors):
    try:
        region = fedlane.Region(tensors)
    except (fedlane.FedlaneError, TypeError):
        return
    assert sorted(region.names) == sorted(tensors)
    assert len(memoryview(region)) == region.bytes
    assert not any(memoryview(region))


ARRAY = st.tuples(
    st.sampled_from(NATIVE + EXTENDED), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), ARRAY, max_size=5))
def test_any_arrays_keep_their_bits(described):
    arrays = {
        name: random_array(dtype, tuple(shape), seed)
        for name, (dtype, shape, seed) in described.items()
        if name != "__metadata__"
    }
    region = fedlane.Region.from_arrays(arrays)
    for name, array in arrays.items():
        assert region.numpy(name).tobytes() == array.tobytes()
