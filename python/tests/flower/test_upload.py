"""Processes killed in mid-upload: the round goes on with the rest, and the mean is that of the rest, exactly.

The uploads pass a slow proxy, so that the test knows when they run. Each SuperNode has a pool of its own.
"""

import re

import pytest
from conftest import finished
from harness import APPS, PATIENCE, Deployment, wait_until
from proxy import Proxy
from test_faults import assert_mean_of_counted, counted, pools, switches

ELEMENTS = 6_000_000
UPDATE_BYTES = 4 * ELEMENTS
RATE = 8e6
CONFIG = {"elements": ELEMENTS, "rounds": 1, "fedlane.deadline-s": 5.0}

ANY_MODE = pytest.mark.parametrize("mode", ["streaming", pytest.param("any", marks=pytest.mark.long)])


def killed(mode: str, victims, **config: object) -> dict:
    """A run in which victims(flower), pids, are killed when a part of an update has come."""
    pytest.importorskip("fedlane.flower")
    with Proxy(RATE) as proxy, Deployment(clients=3, own_pools=True) as flower:
        run = flower.start(APPS / "faults", CONFIG | switches(mode) | proxy.run_config | config)
        # The victim may be the last to begin.
        ready = lambda: proxy.uploaded > UPDATE_BYTES / 4 and victims(flower)  # noqa: E731
        assert wait_until(ready, 90), flower.logs()
        found = victims(flower)
        assert found, "there is nobody to kill"
        for pid in found:
            flower.kill(pid)
        assert proxy.uploaded < 2 * UPDATE_BYTES, "the uploads were over too soon for this test"
        result = finished(run.wait(120))
    assert pools(flower) == []
    return result


@ANY_MODE
def test_a_pool_killed_in_mid_upload(mode):
    """Its update is lost: whoever was not received whole is not in the mean."""
    result = killed(mode, lambda flower: flower.pools(1))
    # Flower delivered the reply. Whether it comes as an error depends on when the pool was killed.
    assert counted(result) in ([[0, 2]], [[0, 1, 2]])
    if mode == "streaming":
        # Without it, or with it if the pool was killed when all of it had been taken.
        assert result["least"] == result["most"]
        assert result["most"] in ((1 + 4) / 2, pytest.approx((1 + 2 + 4) / 3))
    else:
        assert_mean_of_counted(result)


@ANY_MODE
@pytest.mark.long
def test_a_supernode_killed_in_mid_upload(mode):
    """Its pool lives until the update is taken: it counts, because Flower has delivered its reply."""
    def replied(flower: Deployment) -> list[int]:
        trained = re.search("Sending: train.*Sent successfully", flower.logs("supernode1"), re.DOTALL)
        return [flower.supernodes[1]] if trained else []

    result = killed(mode, replied, **{"timeout-s": 30.0 * PATIENCE})
    assert counted(result) == [[0, 1, 2]]
    assert_mean_of_counted(result)


@ANY_MODE
@pytest.mark.long
def test_a_clientapp_killed_in_mid_upload(mode):
    """The update is the pool's, not the ClientApp's."""
    config = {"fault": "linger", "timeout-s": 90.0 * PATIENCE}
    result = killed(mode, lambda flower: flower.clientapps(flower.supernodes[1]), **config)
    assert counted(result) == [[0, 1, 2]]
    assert_mean_of_counted(result)


@pytest.mark.long
def test_everybody_killed_in_mid_upload():
    """Without an update there is no mean: an error, not a model."""
    pytest.importorskip("fedlane.flower")
    with Proxy(RATE) as proxy, Deployment(clients=2, env={"FEDLANE_TEST_POOL": "all"}) as flower:
        run = flower.start(APPS / "faults", CONFIG | switches("streaming") | proxy.run_config | {"clients": 2})
        assert wait_until(lambda: proxy.uploaded > UPDATE_BYTES / 4, 90), flower.logs()
        for pid in flower.pools():
            flower.kill(pid)
        assert wait_until(run.ended, 90)
        assert not run.result.exists()
        assert run.state == "finished:failed"
        assert "lost" in run.logs("serverapp")


@ANY_MODE
@pytest.mark.long
def test_a_connection_cut_in_mid_upload(mode):
    """Nobody can be reached any more: without updates, no model is made up."""
    pytest.importorskip("fedlane.flower")
    with Proxy(RATE) as proxy, Deployment(clients=2) as flower:
        run = flower.start(APPS / "faults", CONFIG | switches(mode) | proxy.run_config | {"clients": 2})
        assert wait_until(lambda: proxy.uploaded > UPDATE_BYTES / 4, 90), flower.logs()
        proxy.cut()
        assert wait_until(run.ended, 120)
        if run.result.exists():
            # Whose update came before the cut; with none, the model stays as it was.
            assert run.json()["least"] == run.json()["most"]
            assert run.json()["most"] in (0.0, 1.0, 2.0, 1.5)
        assert "lost" in run.logs("serverapp")
