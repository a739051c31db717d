"""The example learns, and the change that its README shows is the whole change."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower-digits"


def shown_diff() -> str:
    return re.search(r"```diff\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)[1]


@pytest.fixture(scope="module")
def plain_app(tmp_path_factory):
    """The example with the README's diff taken back: a Flower app without fedlane."""
    folder = tmp_path_factory.mktemp("plain") / "app"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--reverse", "-"], input=shown_diff(), text=True, cwd=folder, check=True)
    return folder


def accuracies(flower, app: Path) -> list[float]:
    """The accuracy of each round, as the ServerApp printed it."""
    before = set(flower.folder.glob("logs/serverapp*"))
    run = flower.run(app, {"rounds": 3}, timeout_s=120, result=False)
    assert run.state == "finished:completed", run.logs("serverapp")
    (log,) = set(flower.folder.glob("logs/serverapp*")) - before
    return [float(each) for each in re.findall(r"^round \d: accuracy ([\d.]+)$", log.read_text(), re.MULTILINE)]


def assert_learns(rounds: list[float]) -> None:
    assert len(rounds) == 3
    assert rounds[-1] > 0.85
    assert rounds[-1] > rounds[0]


def test_the_diff_leaves_no_trace_of_fedlane(plain_app):
    code = "".join(each.read_text() for each in plain_app.glob("digits/*.py"))
    assert "fedlane" not in code
    changed = [each for each in shown_diff().splitlines() if re.match(r"[+-](?![+-])", each)]
    assert len(changed) == 6


@pytest.mark.long
def test_plain_flower_learns(flower, plain_app):
    pytest.importorskip("sklearn")
    assert_learns(accuracies(flower, plain_app))


def test_it_learns_with_fedlane(flower):
    pytest.importorskip("sklearn")
    pytest.importorskip("fedlane.flower")
    assert_learns(accuracies(flower, EXAMPLE))
