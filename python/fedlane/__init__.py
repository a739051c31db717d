"""fedlane moves the parameters of a model between an aggregator and its clients and averages
them while they arrive."""

from ._core import FedlaneError, ModelError, OutOfMemory, PeerError, Region, __version__

__all__ = ["FedlaneError", "ModelError", "OutOfMemory", "PeerError", "Region", "__version__"]
