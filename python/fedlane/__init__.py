"""fedlane moves the parameters of a model between an aggregator and its clients and averages
them while they arrive."""

from ._core import (
    Aggregator,
    Client,
    Edge,
    FedlaneError,
    ModelError,
    OutOfMemory,
    PeerError,
    Region,
    Ring,
    __version__,
    load,
    save,
)

__all__ = [
    "Aggregator",
    "Client",
    "Edge",
    "FedlaneError",
    "ModelError",
    "OutOfMemory",
    "PeerError",
    "Region",
    "Ring",
    "__version__",
    "load",
    "save",
]
