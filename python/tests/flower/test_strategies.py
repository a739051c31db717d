"""Every strategy of Flower gives the same bits with fedlane as without."""

import pytest
from compare import assert_plain, assert_through_fedlane, differences

STRATEGIES = [
    "FedAvg", "FedProx", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedMedian", "FedTrimmedAvg", "Krum",
    "MultiKrum", "Bulyan", "QFedAvg", "DpServerFixed", "DpServerAdaptive", "DpClientFixed", "DpClientAdaptive",
    "LocalDp",
]


@pytest.fixture(scope="module")
def plain(run_app):
    return run_app("strategies", fedlane=False)


@pytest.fixture(scope="module")
def with_fedlane(run_app):
    pytest.importorskip("fedlane.flower")
    return run_app("strategies", fedlane=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_plain_flower_runs_it(plain, name):
    result = plain["strategies"][name]
    assert "error" not in result, result
    assert len(result["metrics"]) == 2
    assert len(result["arrays"]) >= 5


def test_every_strategy_is_listed(plain):
    assert sorted(plain["strategies"]) == sorted(STRATEGIES)


def test_strategies_do_not_give_equal_models(plain):
    """Otherwise the comparisons below could not fail."""
    models = [result["arrays"]["dense.weight"][2] for result in plain["strategies"].values()]
    assert len(set(models)) == len(models)


def test_plain_flower_carries_the_arrays(plain):
    assert_plain(plain)


@pytest.mark.long
def test_plain_flower_gives_the_same_bits_twice(flower, run_app, plain):
    again = run_app("strategies", fedlane=False, rounds=2)
    assert again["strategies"] == plain["strategies"]


def test_flower_carries_only_tickets(with_fedlane):
    assert_through_fedlane(with_fedlane)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_bits_with_fedlane(plain, with_fedlane, name):
    expected, actual = plain["strategies"][name], with_fedlane["strategies"][name]
    assert "error" not in actual, actual
    assert differences(expected["arrays"], actual["arrays"]) == []
    assert actual["metrics"] == expected["metrics"]


@pytest.mark.long
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_bits_with_messages_of_its_own(run_app, name):
    """Without the bundle: each strategy alone on the grid, as in an app."""
    pytest.importorskip("fedlane.flower")
    config = {"bundle": False, "only": name}
    expected, actual = (run_app("strategies", fedlane=each, **config) for each in (False, True))
    assert_through_fedlane(actual)
    assert differences(expected["strategies"][name]["arrays"], actual["strategies"][name]["arrays"]) == []
    assert actual["strategies"][name]["metrics"] == expected["strategies"][name]["metrics"]
