"""DLPack exports, and views in PyTorch where it is installed."""

import gc
import sys

import fedlane
import numpy as np
import pytest


def test_numpy_shares_the_memory():
    region = fedlane.Region({"w": ("float32", (2, 3)), "n": ("int64", ()), "none": ("int8", (0, 4))})
    array = np.from_dlpack(region.dlpack("w"))
    region.numpy("w")[1, 2] = 8
    assert array[1, 2] == 8
    assert array.strides == (12, 4)
    assert np.from_dlpack(region.dlpack("n")).shape == ()
    assert np.from_dlpack(region.dlpack("none")).shape == (0, 4)


def test_capsules_that_nobody_takes_are_freed():
    region = fedlane.Region({"w": ("float32", (2, 3))})
    for version in (None, (0, 8), (1, 0), (1, 1), (2, 0)):
        capsule = region.dlpack("w").__dlpack__(max_version=version)
        name = "dltensor" if version in (None, (0, 8)) else "dltensor_versioned"
        assert name in repr(capsule)
        del capsule
        gc.collect()


def test_what_cannot_be_done_is_refused():
    exported = fedlane.Region({"w": ("float32", (2,)), "q": ("float8_e5m2", (2,))})
    tensor = exported.dlpack("w")
    assert tensor.__dlpack_device__() == (1, 0)
    for arguments in ({"dl_device": (2, 0)}, {"copy": True}, {"stream": 1}):
        with pytest.raises(BufferError):
            tensor.__dlpack__(**arguments)
    with pytest.raises(BufferError, match="version 1"):
        exported.dlpack("q").__dlpack__()


def test_exports_are_read_only_while_sending(sending):
    # Older NumPy knows only the protocol without read-only tensors.
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert not np.from_dlpack(sending.region.dlpack("w")).flags.writeable
    with pytest.raises(BufferError, match="being sent"):
        sending.region.dlpack("w").__dlpack__()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)])
def test_torch_views(name, shape):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        region = fedlane.Region({"x": (name, shape)})
        with pytest.raises(ImportError, match="pip install -U torch"):
            region.torch("x")
        return
    given = torch.ones(shape, dtype=getattr(torch, name))
    region = fedlane.Region.from_arrays({"x": given})
    views = [region.torch("x")]
    if name not in ("bool", "float8_e4m3fn"):
        views.append(torch.from_dlpack(region.dlpack("x")))
    for view in views:
        assert view.dtype == given.dtype
        assert tuple(view.shape) == shape
        assert torch.equal(view, given)
        view.zero_()
        assert not any(memoryview(region))
        view.fill_(1)
    del region
    gc.collect()
    assert torch.equal(views[0], given)


def test_torch_state_with_gradients():
    torch = pytest.importorskip("torch")
    layer = torch.nn.BatchNorm1d(3)
    region = fedlane.Region.from_arrays(layer.state_dict() | {"p": layer.weight})
    assert region.dtype("num_batches_tracked") == "int64"
    assert torch.equal(region.torch("p"), layer.weight.detach())


def test_torch_is_refused_while_sending(sending):
    with pytest.raises(BufferError, match="Region.numpy"):
        sending.region.torch("w")


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        fedlane.Region({"x": ("bfloat16", ())}).torch("x")
