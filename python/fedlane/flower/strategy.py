"""Flower's averaging strategies, with the mean made while the updates arrive.

The ServerApp never holds an update: it asks the clients whose replies Flower has delivered for
their arrays, all at once, and averages chunk by chunk. A client counts if, and only if, its reply
was delivered and its update came whole.
"""

from collections.abc import Iterable
from logging import WARNING
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, strategy

from fedlane import ModelError, PeerError

from .grid import FedlaneGrid


class FedAvg(strategy.FedAvg):
    """As `flwr.serverapp.strategy.FedAvg`, averaged while the updates arrive.

    Floats are summed in f32 (f64 for float64), integers in f64 and then rounded; the mean has the
    model's dtypes. The order is that of the replies, or with ``fedlane.order = "client"`` that of
    the node ids. Needs a `FedlaneGrid`; with another grid, or for a model that cannot be carried,
    it is Flower's own.
    """

    _grid: FedlaneGrid | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See `flwr.serverapp.strategy.FedAvg`."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._grid = grid if isinstance(grid, FedlaneGrid) else None
        if self._grid is None:
            log(WARNING, "fedlane: this strategy averages like Flower's: its grid is no FedlaneGrid")
        else:
            self._grid.hold(messages, self._weight)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See `flwr.serverapp.strategy.FedAvg`."""
        replies = list(replies)
        grid = self._grid
        if grid is None or not any(grid.is_held(reply) for reply in replies):
            return super().aggregate_train(server_round, replies)
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        valid.sort(key=lambda reply: reply.metadata.src_node_id)
        try:
            mean, counted = grid.average(valid, [self._weight(reply) for reply in valid])
        except ModelError as error:
            log(WARNING, "fedlane: averaged like Flower does, with all updates here: %s", error)
            return super().aggregate_train(server_round, grid.unhold(valid))
        except PeerError as error:
            # As if nobody had replied: the model stays as it is.
            log(WARNING, "fedlane: this round has no mean, its updates are lost: %s", error)
            return None, None
        contents = [reply.content for place, reply in enumerate(valid) if place in counted]
        return mean, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _weight(self, reply: Message) -> float:
        (metrics,) = reply.content.metric_records.values()
        # Flower checks that it is one number.
        return float(cast(float, metrics[self.weighted_by_key]))


class FedProx(strategy.FedProx, FedAvg):
    """As `flwr.serverapp.strategy.FedProx`, averaged while the updates arrive."""


class FedAvgM(strategy.FedAvgM, FedAvg):
    """As `flwr.serverapp.strategy.FedAvgM`, averaged while the updates arrive."""


class FedAdam(strategy.FedAdam, FedAvg):
    """As `flwr.serverapp.strategy.FedAdam`, averaged while the updates arrive."""


class FedYogi(strategy.FedYogi, FedAvg):
    """As `flwr.serverapp.strategy.FedYogi`, averaged while the updates arrive."""


class FedAdagrad(strategy.FedAdagrad, FedAvg):
    """As `flwr.serverapp.strategy.FedAdagrad`, averaged while the updates arrive."""
