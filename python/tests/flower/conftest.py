"""One deployment for all tests that harm no process. FEDLANE_TEST_LONG=1 also runs the tests marked `long`."""

import os

import pytest
from harness import APPS, Deployment, Run


def pytest_configure(config):
    config.addinivalue_line("markers", "long: not in ./test, because a round of Flower takes seconds")


def pytest_collection_modifyitems(items):
    if not os.environ.get("FEDLANE_TEST_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="set FEDLANE_TEST_LONG=1"))


@pytest.fixture(scope="session")
def flower():
    with Deployment(clients=4) as deployment:
        yield deployment
    outlived = [each for each in deployment.leftovers if each.role == "other"]
    assert outlived == [], "these processes outlived their SuperNodes"


@pytest.fixture(scope="session")
def run_app(flower):
    """run_app(name, **run_config): the result of one run; the same run is not made twice."""
    done: dict[tuple, dict] = {}

    def run(name: str, **config: object) -> dict:
        key = (name, *sorted(config.items()))
        if key not in done:
            done[key] = finished(flower.run(APPS / name, config, timeout_s=240))
        return done[key]

    return run


def finished(run: Run) -> dict:
    """The result of a run, after Flower has called it completed."""
    result = run.json()
    assert run.state == "finished:completed", run.logs("serverapp")
    return result
