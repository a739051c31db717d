"""The stubs say what the module is."""

import subprocess
import sys

import fedlane


def test_stubs(tmp_path):
    command = [sys.executable, "-m", "mypy.stubtest", "fedlane._core"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_public_is_documented():
    for name in fedlane.__all__:
        public = getattr(fedlane, name)
        assert name == "__version__" or public.__doc__, name
        for part in vars(public) if isinstance(public, type) else ():
            assert part.startswith("_") or getattr(public, part).__doc__, f"{name}.{part}"
