"""Who may write while a region is sent."""

import fedlane
import numpy as np
import pytest
from conftest import layout


def test_views_are_read_only_while_sending_and_writable_after(sending):
    mine = sending.region.numpy("scalar")
    mine_for_ever = sending.region.numpy("scalar")
    for view in (sending.early_view, mine, sending.region.numpy("w")):
        assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        sending.early_view[0] = 1
    with pytest.raises(ValueError):
        sending.early_view.flags.writeable = True
    assert memoryview(sending.region).readonly
    del mine_for_ever
    sending.release()
    sending.sent.result(60)
    assert sending.early_view.flags.writeable
    assert mine.flags.writeable
    assert not memoryview(sending.region).readonly
    sending.early_view[0] = 1
    assert sending.served.result(60).numpy("w")[0] == 0


def test_a_change_that_nothing_can_prevent_is_an_error(sending):
    assert not sending.early_buffer.readonly
    last = sending.region.bytes - 1
    sending.early_buffer[last] ^= 1
    sending.release()
    with pytest.raises(fedlane.PeerError, match='client "b".*checksum'):
        sending.served.result(60)
    with pytest.raises(fedlane.PeerError, match="ended the session"):
        sending.sent.result(60)
    assert sending.early_view.flags.writeable


def test_what_was_read_only_before_stays_so(tmp_path):
    region = fedlane.Region({"w": ("float32", (2,))})
    view = region.numpy("w")
    view.flags.writeable = False
    fedlane.save(region, tmp_path / "model.safetensors")
    assert not view.flags.writeable


def test_a_region_is_thawed_when_sending_fails(tmp_path):
    region = fedlane.Region({"w": ("float32", (2,))})
    view = region.numpy("w")
    with pytest.raises(OSError):
        fedlane.save(region, tmp_path / "missing" / "model.safetensors")
    view[0] = 1


def test_views_that_are_gone_are_forgotten():
    region = fedlane.Region({"w": ("float32", (2,))})
    for _ in range(1000):
        region.numpy("w")
    kept = [region.numpy("w") for _ in range(100)]
    assert all(view.flags.writeable for view in kept)
    assert layout(region) == {"w": ("float32", (2,))}
    assert np.shares_memory(kept[0], kept[99])
