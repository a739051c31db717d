"""Clients that cannot be served by fedlane go Flower's own way: with a warning, and with the same result."""

import re
from pathlib import Path

import pytest
from conftest import finished
from harness import APPS, PATIENCE, Deployment, wait_until
from proxy import BlackHole, Proxy
from test_faults import assert_mean_of_counted, counted, switches

pytest.importorskip("fedlane.flower")

ANY_MODE = pytest.mark.parametrize("mode", ["any", "streaming"])


def warnings(flower: Deployment, before: set[Path]) -> str:
    """What the ServerApp of the newest run logged."""
    (log,) = set(flower.folder.glob("logs/serverapp*")) - before
    return log.read_text()


def run(flower: Deployment, mode: str, **config: object) -> tuple[dict, str]:
    before = set(flower.folder.glob("logs/serverapp*"))
    run = flower.run(APPS / "faults", switches(mode) | {"clients": 4} | config, timeout_s=200)
    return finished(run), warnings(flower, before)


def served_plainly(log: str) -> int:
    """How many nodes were. On a busy host a round is long, and some are tried again in the next one."""
    return len(set(re.findall(r"fedlane: node (\d+) is served Flower's own way", log)))


@pytest.mark.parametrize("mode", ["streaming", pytest.param("any", marks=pytest.mark.long)])
def test_some_clients_cannot(flower, mode):
    """Partition 1 lacks the mod, 2 has a wrong secret of the model, 3 one of its update."""
    result, log = run(flower, mode, meddle=",none,model,update")
    assert counted(result) == [[0, 1, 2, 3]] * 2
    assert_mean_of_counted(result)
    assert served_plainly(log) == 2
    assert "Has its ClientApp mods=[fedlane_mod]" in log
    assert len(re.findall(r"fedlane: node \d+ sent arrays Flower's own way", log)) == 2


@ANY_MODE
@pytest.mark.long
def test_wrong_numbers_and_versions(flower, mode):
    """Partition 1 gets an order of another version; 2 replies with the number of an update that it never left."""
    result, log = run(flower, mode, meddle=",version,number", rounds=1, **{"fedlane.deadline-s": 3.0})
    assert served_plainly(log) == 1
    assert re.search(r"the update of node \d+ is lost", log)
    assert result["least"] == result["most"] == pytest.approx((1 + 2 + 8) / 3)


@ANY_MODE
@pytest.mark.long
def test_nobody_listens(flower, mode):
    result, log = run(flower, mode, **{"fedlane.advertise": "127.0.0.1:9"})
    assert counted(result) == [[0, 1, 2, 3]] * 2
    assert_mean_of_counted(result)
    assert served_plainly(log) == 4
    assert "127.0.0.1:9" in log


@ANY_MODE
@pytest.mark.long
def test_nobody_answers(flower, mode):
    """Four clients of one host wait for the same port, but not one after the other."""
    with BlackHole() as hole:
        config = {"fedlane.advertise": hole.address, "fedlane.deadline-s": 20.0, "timeout-s": 200.0 * PATIENCE}
        result, log = run(flower, mode, **config)
    assert counted(result) == [[0, 1, 2, 3]] * 2
    assert_mean_of_counted(result)
    assert served_plainly(log) == 4
    first, second = (each["seconds"] for each in result["rounds"])
    assert 20 < first < 60 * PATIENCE
    # Not asked again so soon: that would cost 20 s too.
    assert second < 20 * PATIENCE


def test_required(flower):
    before = set(flower.folder.glob("logs/serverapp*"))
    config = switches("any") | {"clients": 4, "fedlane.required": True, "fedlane.advertise": "127.0.0.1:9"}
    failed = flower.run(APPS / "faults", config, timeout_s=120)
    assert failed.state == "finished:failed"
    assert not failed.result.exists()
    assert "fedlane.required is set, and node" in warnings(flower, before)


@ANY_MODE
@pytest.mark.long
def test_blocked_for_uploads_only(flower, mode):
    """The port is reached for the model, and is gone when the update is to be left."""
    before = set(flower.folder.glob("logs/serverapp*"))
    with Proxy() as proxy:
        config = switches(mode) | {"clients": 4, "rounds": 1, "fault": "pause", "fedlane.deadline-s": 3.0}
        started = flower.start(APPS / "faults", config | proxy.run_config)
        paused = [started.result.with_suffix(f".paused{partition}") for partition in range(4)]
        assert wait_until(lambda: all(each.exists() for each in paused), 90), flower.logs()
        proxy.cut()
        started.result.with_suffix(".go").touch()
        result = finished(started.wait(120))
    assert counted(result) == [[0, 1, 2, 3]]
    assert_mean_of_counted(result)
    assert len(re.findall(r"fedlane: node \d+ sent arrays Flower's own way", warnings(flower, before))) == 4


@pytest.mark.long
def test_required_for_uploads_too(flower):
    before = set(flower.folder.glob("logs/serverapp*"))
    config = switches("any") | {"clients": 4, "rounds": 1, "meddle": "update", "fedlane.required": True}
    failed = flower.run(APPS / "faults", config, timeout_s=120)
    assert failed.state == "finished:failed"
    assert "fedlane.required is set, and node" in warnings(flower, before)
