"""State dicts of bf16 and float8, which plain Flower cannot carry, as users of PyTorch send them."""

import pytest
from compare import assert_through_fedlane
from harness import APPS

pytest.importorskip("torch", reason="PyTorch is not installed: state dicts of bf16 and float8 are not sent")
pytest.importorskip("fedlane.flower")


@pytest.fixture(scope="module")
def result(run_app):
    return run_app("tensors", streaming=True)


def test_every_bit_comes_back(result):
    assert result["different"] == []
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2"} <= set(result["sent"])


def test_a_model_of_bf16_is_averaged_as_bf16(result):
    """Two rounds of the mean of 1, 2, 4 and 8."""
    assert result["mean"] == {"weight": ["torch.bfloat16", [7.5]], "bias": ["torch.bfloat16", [7.5]]}


def test_flower_carries_only_tickets(result):
    assert_through_fedlane(result)


def test_plain_flower_cannot(flower):
    """Otherwise there would be no need for it."""
    run = flower.run(APPS / "tensors", {"fedlane": False}, timeout_s=120)
    assert run.state == "finished:failed"
    assert "BFloat16" in run.logs("serverapp")
