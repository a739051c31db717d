"""The same apps in Flower's simulation engine: no SuperNodes, the clients are actors of Ray in one process tree."""

from collections.abc import Sequence
from pathlib import Path

from harness import Deployment


class Simulation(Deployment):
    """A SuperLink whose runs are simulations, with one process (actor) for each of `actors` CPUs."""

    def __init__(self, clients: int = 4, *, actors: int = 2, pythonpath: Sequence[Path] = ()) -> None:
        # Ray does not say to its makers that it runs, and does not fail for lack of a real disk.
        super().__init__(clients=0, pythonpath=pythonpath, env={"RAY_USAGE_STATS_ENABLED": "0"})
        self.options = {
            "num-supernodes": clients,
            "client-resources-num-cpus": 1,
            "init-args-num-cpus": actors,
        }

    def superlink_options(self) -> list[str]:
        return ["--simulation"]

    def run_options(self) -> list[str]:
        return ["--federation-config", " ".join(f"{key}={value}" for key, value in self.options.items())]
