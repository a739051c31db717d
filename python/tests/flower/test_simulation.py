"""Flower's simulation engine: memory is handed over, nothing is sent, the bits are those of plain Flower."""

import pytest
from compare import assert_plain, assert_through_fedlane, differences
from conftest import finished
from harness import APPS

pytest.importorskip("ray", reason="the simulation engine needs Ray: pip install 'flwr[simulation]'")
pytest.importorskip("fedlane.flower")

from simulation import Simulation  # noqa: E402: only with Ray

#: Clients that dial find nobody there, and that is an error: so nobody dials.
NOTHING_SENT = {"fedlane": True, "fedlane.advertise": "127.0.0.1:9", "fedlane.required": True}

ELEMENTS = 500_000
MODEL_BYTES = 2 * 4 * ELEMENTS


@pytest.fixture(scope="module")
def simulation():
    with Simulation(clients=4, actors=2) as deployment:
        yield deployment
    left = [each.command for each in deployment.leftovers if "fedlane" in each.command]
    assert left == [], "these processes outlived the simulation"


def simulated(simulation, app: str, **config: object) -> dict:
    return finished(simulation.run(APPS / app, config, timeout_s=120))


def assert_exact_mean(result: dict, rounds: int) -> None:
    """Each round adds the mean of 1, 2, 4 and 8, which is exact."""
    assert result["values"] == {"first": [0.5 + 3.75 * rounds], "second": [-3.0 + 3.75 * rounds]}


def test_strategies_give_the_same_bits(simulation):
    names = ["FedAvg", "FedMedian", "Krum"]
    config = {"bundle": False, "only": ",".join(names)}
    plain = simulated(simulation, "strategies", fedlane=False, **config)["strategies"]
    result = simulated(simulation, "strategies", fedlane=True, **config)
    assert_through_fedlane(result)
    for name in names:
        assert differences(plain[name]["arrays"], result["strategies"][name]["arrays"]) == []
        assert plain[name]["metrics"] == result["strategies"][name]["metrics"]


@pytest.mark.long
def test_plain_flower_carries_the_arrays(simulation):
    result = simulated(simulation, "actors", fedlane=False, state=True)
    assert_plain(result)
    assert_exact_mean(result, 3)


@pytest.mark.parametrize("streaming", [False, True])
def test_nothing_is_sent_and_nothing_grows(simulation, streaming):
    """What actors keep of a message, in their process or in their context, stays as it was."""
    config = NOTHING_SENT | {"streaming": streaming, "rounds": 20, "elements": ELEMENTS, "state": True}
    result = simulated(simulation, "actors", **config)
    assert_through_fedlane(result)
    assert_exact_mean(result, 20)
    assert result["metrics"][-1]["checked"] > 0
    early, late = result["rounds"][5:10], result["rounds"][-5:]
    # Ten rounds lie between: a file or an update of each client's would be 40 of them.
    for what, slack in (("files", 10), ("bytes", 10 * MODEL_BYTES)):
        assert max(each[what] for each in late) <= max(each[what] for each in early) + slack
