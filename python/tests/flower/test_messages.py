"""Every kind of message means the same with fedlane as without."""

import pytest
from compare import assert_plain, unpack

STEPS = ["several_records", "state", "replies_used", "nothing", "pushed"]


@pytest.fixture(scope="module")
def plain(run_app):
    return run_app("messages", fedlane=False)


@pytest.fixture(scope="module")
def with_fedlane(run_app):
    pytest.importorskip("fedlane.flower")
    return run_app("messages", fedlane=True)


def test_plain_flower_echoes_what_was_sent(plain):
    assert_plain(plain)
    *replies, untouched = plain["steps"]["several_records"]
    assert untouched
    assert len(replies) == 2
    for partition, reply in enumerate(replies):
        assert (unpack(reply["added"])["mine"] == partition).all()
        assert unpack(reply["big"])["w"].shape == (300, 301)
        assert reply["seen"][1]["three array i8"] == "<i8 ()"


def test_plain_flower_recalls_state(plain):
    kept, recalled = plain["steps"]["state"][:2], plain["steps"]["state"][2:]
    assert all(each == {"ok": ["MetricRecord", {"kept": 2}]} for each in kept)
    assert all(unpack(each["arrays"])["array i8"].shape == (50, 41) for each in recalled)


def test_plain_flower_lets_replies_be_used(plain):
    assert plain["steps"]["replies_used"][:6] == [True] * 6


@pytest.mark.parametrize("step", STEPS)
def test_the_same_with_fedlane(plain, with_fedlane, step):
    assert with_fedlane["steps"][step] == plain["steps"][step]


def test_flower_carries_no_array_of_a_common_dtype(with_fedlane):
    """Only the record of odd dtypes may go Flower's own way."""
    for way in ("down", "up"):
        assert max(each["array_bytes"] for each in with_fedlane[way]) < 4096
