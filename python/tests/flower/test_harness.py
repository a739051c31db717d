"""The harness itself: nothing lingers, and failures say what the app printed."""

import pytest
from harness import APPS, Deployment, DeploymentError, marked_processes


@pytest.mark.parametrize("isolation", ["subprocess", pytest.param("process", marks=pytest.mark.long)])
def test_every_process_ends(isolation):
    with Deployment(clients=1, isolation=isolation) as flower:
        run = flower.run(APPS / "faults", {"clients": 1, "rounds": 1}, timeout_s=60)
        assert [each["good"] for each in run.json()["rounds"]] == [[0]]
        roles = [each.role for each in flower.processes()]
        assert roles.count("superlink") == 1
        assert roles.count("supernode") == 1
        assert roles.count("superexec") == 2
    # A ServerApp of flwr 1.34 may take longer to see that its SuperExec has ended, and is killed.
    assert [each for each in flower.leftovers if each.role == "other"] == []
    assert marked_processes(flower.mark) == []


def test_a_serverapp_that_fails_is_reported_with_its_output():
    with Deployment(clients=1) as flower:
        run = flower.run(APPS / "strategies", {"clients": 1, "only": "Unknown"}, timeout_s=60)
        with pytest.raises(DeploymentError, match="KeyError: 'Unknown'"):
            run.json()
        assert run.state == "finished:failed"
