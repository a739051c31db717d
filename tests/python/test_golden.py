"""The golden means that Rust is tested with are those that NumPy computes."""

import pathlib
import shutil
import subprocess
import sys

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def test_golden_means_are_those_of_numpy(tmp_path):
    script = shutil.copy(GOLDEN / "make.py", tmp_path)
    subprocess.run([sys.executable, script], check=True)
    made = (tmp_path / "golden.json").read_text()
    # Not compared by pytest, which would print both.
    same = made == (GOLDEN / "golden.json").read_text()
    assert same, "tests/golden/golden.json is not what make.py writes"
