"""Clients that fail: the round goes on with the rest, and the mean is that of the rest, exactly."""

import pytest
from compare import assert_through_fedlane
from conftest import finished
from harness import APPS, PATIENCE, Deployment, Process, wait_until

# Flower takes a minute to notice a process that was killed, so rounds with one end by their deadline.
ROUND_S = 15.0 * PATIENCE
UPLOAD_ROUND_S = {"plain": 60.0 * PATIENCE, "any": 20.0 * PATIENCE, "streaming": 20.0 * PATIENCE}
UPLOAD_ELEMENTS = 30_000_000


def modes(*short: str):
    """Plain Flower, fedlane under an unmodified FedAvg, and fedlane's streaming FedAvg; all but `short` are long."""
    return pytest.mark.parametrize("mode", [
        each if each in short else pytest.param(each, marks=pytest.mark.long)
        for each in ("plain", "any", "streaming")])


def switches(mode: str) -> dict:
    if mode != "plain":
        pytest.importorskip("fedlane.flower")
    return {"fedlane": mode != "plain", "streaming": mode == "streaming"}


def assert_mean_of_counted(result: dict) -> None:
    """The model is the sum over rounds of the mean of 2^partition over the clients that were counted."""
    expected = sum(sum(2.0**each for each in one["good"]) / len(one["good"]) for one in result["rounds"])
    assert result["least"] == pytest.approx(expected, rel=1e-6)
    assert result["most"] == pytest.approx(expected, rel=1e-6)


def counted(result: dict) -> list[list[int]]:
    return [each["good"] for each in result["rounds"]]


@modes()
def test_no_fault(run_app, mode):
    result = run_app("faults", clients=4, **switches(mode))
    assert counted(result) == [[0, 1, 2, 3]] * 2
    assert_mean_of_counted(result)
    if mode != "plain":
        assert_through_fedlane(result)


@modes("streaming")
def test_a_clientapp_that_raises(run_app, mode):
    result = run_app("faults", clients=4, fault="raise", **switches(mode))
    assert counted(result) == [[0, 2, 3], [0, 1, 2, 3]]
    assert "told to raise" in result["rounds"][0]["errors"][0]
    assert_mean_of_counted(result)


@modes()
def test_layout_that_changes_between_rounds(run_app, mode):
    result = run_app("faults", clients=4, fault="grow", rounds=3, **switches(mode))
    assert counted(result) == [[0, 1, 2, 3]] * 3
    assert_mean_of_counted(result)
    assert {name: each[1] for name, each in result["rest"].items()} == {
        "grown1": [1, 3], "grown2": [2, 3], "grown3": [3, 3]}


def broken(fault: str, mode: str, **config: object) -> dict:
    """A run on a deployment of its own, in which partition 1 dies. No pool may outlive the deployment."""
    config = switches(mode) | {"fault": fault, "timeout-s": ROUND_S} | config
    with Deployment(clients=3) as flower:
        result = finished(flower.run(APPS / "faults", config, timeout_s=120))
    assert pools(flower) == []
    return result


def pools(flower: Deployment) -> list[Process]:
    """What fedlane left behind. A ClientApp whose SuperNode was killed lives on also in plain Flower."""
    return [each for each in flower.leftovers if each.role == "other"]


@modes()
def test_a_clientapp_killed_in_training(mode):
    result = broken("kill-app", mode, rounds=1)
    assert counted(result) == [[0, 2]]
    assert_mean_of_counted(result)


@modes()
@pytest.mark.parametrize("fault", ["kill-upload", "kill-node"])
def test_killed_while_the_reply_is_on_its_way(mode, fault):
    """Whether the reply still came is up to the clock; who is counted must agree with it. See test_upload.py."""
    result = broken(fault, mode, rounds=1, elements=UPLOAD_ELEMENTS, **{"timeout-s": UPLOAD_ROUND_S[mode]})
    assert counted(result)[0] in ([0, 2], [0, 1, 2])
    assert result["elements"] == UPLOAD_ELEMENTS
    assert_mean_of_counted(result)


@modes()
def test_a_supernode_killed_in_training(mode):
    config = switches(mode) | {"fault": "sleep", "timeout-s": ROUND_S}
    with Deployment(clients=3) as flower:
        run = flower.start(APPS / "faults", config)
        # The client leaves this file when it falls asleep.
        assert wait_until(run.result.with_suffix(".asleep").exists, 60), flower.logs()
        flower.kill(flower.supernodes[1])
        result = finished(run.wait(120))
    assert counted(result) == [[0, 2], [0, 2]]
    assert_mean_of_counted(result)
    assert pools(flower) == []

