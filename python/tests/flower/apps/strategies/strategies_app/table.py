"""The strategies, each with the model it is run on and the clipping its clients do."""

from collections.abc import Callable
from typing import NamedTuple

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from .model import floats, mixed


class Case(NamedTuple):
    make: Callable[[int], Strategy]
    model: Callable[[int], dict] = mixed
    clip: str = ""


def plain(kind: type, **options: object) -> Callable[[int], Strategy]:
    return lambda clients: kind(
        fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients, **options)


def private(kind: type, **options: object) -> Callable[[int], Strategy]:
    """A differential privacy wrapper around FedAvg. NumPy's generator is seeded, so the noise is the same."""
    return lambda clients: kind(plain(flower.FedAvg)(clients), num_sampled_clients=clients, **options)


CASES = {
    "FedAvg": Case(plain(flower.FedAvg)),
    "FedProx": Case(plain(flower.FedProx, proximal_mu=0.1)),
    "FedAvgM": Case(plain(flower.FedAvgM, server_learning_rate=0.9, server_momentum=0.7)),
    "FedAdam": Case(plain(flower.FedAdam)),
    "FedYogi": Case(plain(flower.FedYogi)),
    "FedAdagrad": Case(plain(flower.FedAdagrad)),
    "FedMedian": Case(plain(flower.FedMedian)),
    "FedTrimmedAvg": Case(plain(flower.FedTrimmedAvg, beta=0.3)),
    "Krum": Case(plain(flower.Krum, num_malicious_nodes=1)),
    "MultiKrum": Case(plain(flower.MultiKrum, num_malicious_nodes=1, num_nodes_to_select=2)),
    "Bulyan": Case(plain(flower.Bulyan)),
    "QFedAvg": Case(plain(flower.QFedAvg, client_learning_rate=0.1, q=0.2), floats),
    "DpServerFixed": Case(
        private(flower.DifferentialPrivacyServerSideFixedClipping, noise_multiplier=0.3, clipping_norm=4.0),
        floats),
    "DpServerAdaptive": Case(
        private(flower.DifferentialPrivacyServerSideAdaptiveClipping, noise_multiplier=0.3), floats),
    "DpClientFixed": Case(
        private(flower.DifferentialPrivacyClientSideFixedClipping, noise_multiplier=0.3, clipping_norm=4.0),
        floats, "fixed"),
    "DpClientAdaptive": Case(
        private(flower.DifferentialPrivacyClientSideAdaptiveClipping, noise_multiplier=0.3), floats, "adaptive"),
    "LocalDp": Case(plain(flower.FedAvg), floats, "local"),
}
