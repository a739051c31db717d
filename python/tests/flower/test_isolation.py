"""Where ClientApps run: on the server's host, under SuperExecs of their own, over IPv6."""

import os
import signal

import pytest
from compare import assert_through_fedlane
from conftest import finished
from harness import APPS, Deployment, wait_until

pytest.importorskip("fedlane.flower")

FEDLANE = {"fedlane": True, "fedlane.required": True, "clients": 2}


# Other deployments of the same tests have pools too.
OWN_POOL = {"FEDLANE_TEST_POOL": f"fedlane-test-isolation-{os.getpid()}"}


def pools(flower: Deployment) -> list[int]:
    return [each.pid for each in flower.processes() if "fedlane.pool" in each.command]


def assert_exact_mean(result: dict, rounds: int) -> None:
    """Each round adds the mean of 1 and 2."""
    assert_through_fedlane(result)
    assert result["values"] == {"first": [0.5 + 1.5 * rounds], "second": [-3.0 + 1.5 * rounds]}


@pytest.mark.parametrize("streaming", [pytest.param(False, marks=pytest.mark.long), True])
def test_same_host(streaming):
    """Clients that dial find nobody there, and that is an error: so nobody dials. Nor do they need a pool."""
    config = FEDLANE | {"streaming": streaming, "fedlane.advertise": "127.0.0.1:9", "fedlane.same-host": True}
    with Deployment(clients=2) as flower:
        result = finished(flower.run(APPS / "actors", config, timeout_s=60))
        assert pools(flower) == []
    assert_exact_mean(result, 3)
    assert [each for each in flower.leftovers if each.role == "other"] == []


def test_tls():
    """The certificate comes with the messages, to the client and from there to its host's pool."""
    with Deployment(clients=2) as flower:
        config = FEDLANE | {"fedlane.tls": True, "streaming": True}
        result = finished(flower.run(APPS / "actors", config, timeout_s=60))
        assert "with TLS" in flower.logs("serverapp")
    assert_exact_mean(result, 3)


@pytest.mark.long
def test_ipv6():
    with Deployment(clients=2) as flower:
        result = finished(flower.run(APPS / "actors", FEDLANE | {"fedlane.host": "::1"}, timeout_s=60))
        assert "[::1]" in flower.logs("serverapp")
    assert_exact_mean(result, 3)


def test_superexecs_of_their_own():
    with Deployment(clients=2, isolation="process", env=OWN_POOL) as flower:
        for again in (1, 2):
            result = finished(flower.run(APPS / "actors", FEDLANE | {"streaming": again == 2}, timeout_s=60))
            assert_exact_mean(result, 3)
        # The second run meets the first one's pool.
        assert len(pools(flower)) == 1
    assert [each for each in flower.leftovers if each.role == "other"] == []


@pytest.mark.long
def test_the_pool_ends_with_the_last_superexec():
    with Deployment(clients=2, isolation="process", env=OWN_POOL) as flower:
        assert_exact_mean(finished(flower.run(APPS / "actors", FEDLANE, timeout_s=60)), 3)
        # In order of their start: the server's, and one for each client.
        _, *superexecs = sorted(each.pid for each in flower.processes("superexec"))
        flower.kill(superexecs[0])
        assert not wait_until(lambda: not pools(flower), 2)
        os.kill(superexecs[1], signal.SIGKILL)
        assert wait_until(lambda: not pools(flower), 10)
