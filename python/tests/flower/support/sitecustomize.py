"""Keeps what ServerApps and ClientApps print: Flower starts them with stdout and stderr closed off.

Also gives SuperNodes pools of their own, where a test wants it.

Python imports this module in every process of a Deployment, because the folder is on PYTHONPATH.
"""

import os
import sys


def keep_output() -> None:
    role = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    logs = os.environ.get("FEDLANE_TEST_LOGS")
    if not logs or role not in ("flwr-serverapp", "flwr-simulation", "flwr-clientapp"):
        return
    log = os.open(f"{logs}/{role[5:]}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def own_pool() -> None:
    """Lets a SuperNode have a pool of its own, as if it ran on another host."""
    if pool := os.environ.get("FEDLANE_TEST_POOL"):
        from fedlane import _core

        _core.__version__ += f"-{pool}"


keep_output()
own_pool()
