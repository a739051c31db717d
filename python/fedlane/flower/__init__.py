"""fedlane under Flower: arrays travel over a data port, Flower does everything else.

In the ClientApp: ``ClientApp(mods=[fedlane_mod])``. In the ServerApp:
``grid = FedlaneGrid(grid, context)``. To average while updates arrive, take `FedAvg` and its kin
from here instead of `flwr.serverapp.strategy`.
"""

from . import arrays
from .grid import FedlaneGrid
from .mod import fedlane_mod
from .strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

arrays.install()

__all__ = [
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedYogi",
    "FedlaneGrid",
    "fedlane_mod",
]
