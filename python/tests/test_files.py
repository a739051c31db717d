"""save and load, against the safetensors package."""

import os
import stat

import fedlane
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

ARRAYS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "scalar": np.asarray(7, np.int64),
    "none": np.zeros((0, 3), np.float16),
    "flag": np.array([True, False, True]),
}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_safetensors_reads_what_we_save(tmp_path):
    path = tmp_path / "model.safetensors"
    fedlane.save(fedlane.Region.from_arrays(ARRAYS, metadata={"format": "np"}), path)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "np"}
        assert set(file.keys()) == set(ARRAYS)
    loaded = load_file(path)
    assert all(same(loaded[name], array) for name, array in ARRAYS.items())


def test_we_read_what_safetensors_saves(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path, metadata={"a": "b"})
    region = fedlane.load(str(path))
    assert region.metadata == {"a": "b"}
    assert all(same(region.numpy(name), array) for name, array in ARRAYS.items())
    fedlane.save(region, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_our_layout_is_that_of_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path)
    region = fedlane.Region.from_arrays(ARRAYS)
    assert [name for name in region.names if name != "none"] == [
        name for name in fedlane.load(path).names if name != "none"
    ]
    assert bytes(memoryview(region)) == bytes(memoryview(fedlane.load(path)))


def test_a_failed_save_leaves_what_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    resource = pytest.importorskip("resource")
    region = fedlane.Region({"w": ("float32", (1 << 20,))})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="model.safetensors"):
            fedlane.save(region, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_paths_that_are_no_files(tmp_path):
    region = fedlane.Region({})
    with pytest.raises(FileNotFoundError, match="missing.safetensors"):
        fedlane.load(tmp_path / "missing.safetensors")
    with pytest.raises(fedlane.ModelError, match="a directory"):
        fedlane.load(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(fedlane.ModelError, match="FIFO"):
        fedlane.load(fifo)
    for target in (tmp_path, fifo, tmp_path / "no" / "file", ""):
        with pytest.raises(OSError, match="cannot be written to"):
            fedlane.save(region, target)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    with pytest.raises(TypeError):
        fedlane.load(1)
    with pytest.raises(TypeError):
        fedlane.save({}, fifo)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 8, b"\xff" * 100, b"\x02" + bytes(7) + b"[]", bytes(9)]
)
def test_files_that_are_no_models(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(fedlane.ModelError, match="bad.safetensors"):
        fedlane.load(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_errors_or_other_models(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file(ARRAYS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut] if data.draw(st.booleans()) else content)
    try:
        region = fedlane.load(path)
    except fedlane.ModelError:
        return
    assert region.bytes == sum(array.nbytes for array in ARRAYS.values())
    assert all(isinstance(region.shape(name), tuple) for name in region.names)
