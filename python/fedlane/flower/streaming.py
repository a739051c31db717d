"""The mean of one round, made while Flower delivers its replies."""

import threading
from collections.abc import Sequence
from logging import WARNING

from flwr.app import ArrayRecord
from flwr.common import log

from fedlane import _core
from fedlane.pool import RESERVE_BYTES, available_bytes

from .arrays import Entry, layout_bytes
from .server import Server

#: Replies that come so soon after each other, in seconds, are averaged in one pass.
_LINGER_S = 0.25
#: Dtypes whose sums are as large as they are: the mean takes the place of the sums.
_OWN_SUMS = {"float32", "float64"}

#: An update: its key and its weight in the mean.
Update = tuple[bytes, float]


class StreamedMean:
    """Adds the updates of delivered replies to a mean, on a thread of its own.

    What was added is thrown away, and begun anew without it, when an update turns out to be lost,
    or is not wanted in the end: so the mean is exact. With ``early`` unset, all is done at the end.
    """

    def __init__(self, server: Server, expected: int, *, early: bool) -> None:
        self._server = server
        self._changed = threading.Condition()
        self._outstanding = expected
        self._early = early
        self._queue: list[Update] = []
        self._added: list[Update] = []
        self._mean = _core.Mean()
        self._lost: dict[bytes, Exception] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fedlane-mean", daemon=True)
        self._thread.start()

    def answer(self, update: Update | None, layout: Sequence[Entry] = ()) -> None:
        """A message has been answered: with an update, or otherwise."""
        with self._changed:
            self._outstanding -= 1
            if update is not None:
                # Nothing is gained by adding early what was handed over on this host.
                here = self._server.is_here(update[0])
                self._early = self._early and not here and has_room(layout)
                self._queue.append(update)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends what runs. Nothing is added any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def finish(self, wanted: list[Update]) -> tuple[ArrayRecord, set[bytes]]:
        """The mean of exactly these updates, and the keys of those in it.

        Without the lost ones; raises `fedlane.PeerError` if all are.
        """
        self.close()
        # An update without weight changes nothing. Weights that are none must be refused.
        weighted = [update for update in wanted if update[1] != 0] or wanted
        if self._added and set(self._added) <= set(weighted):
            rest = [update for update in weighted if update not in self._added]
            rest = [update for update in rest if update[0] not in self._lost]
            try:
                if rest:
                    self._server.add(self._mean, rest)
                return self._server.finish(self._mean), self._keys(wanted)
            except _core.GoneError as error:
                self._blame(error)
            except _core.PeerError as error:
                # Not lost yet: the connection may have broken, and here it may be made anew.
                log(WARNING, "fedlane: the mean is begun anew: %s", error)
        return self._at_once(weighted), self._keys(wanted)

    def _at_once(self, wanted: list[Update]) -> ArrayRecord:
        while True:
            counted = [update for update in wanted if update[0] not in self._lost]
            if not counted:
                raise next(iter(self._lost.values()))
            try:
                return self._server.average(counted)
            except _core.PeerError as error:
                self._blame(error)

    def _keys(self, wanted: list[Update]) -> set[bytes]:
        return {key for key, _ in wanted} - set(self._lost)

    def _blame(self, error: Exception) -> None:
        """Notes which update is lost; raises the error if it says none."""
        key = getattr(error, "key", None)
        if key is None or key in self._lost:
            raise error
        log(WARNING, "fedlane: an update is lost, the mean is made without it: %s", error)
        self._lost[key] = error

    def _run(self) -> None:
        while wave := self._next_wave():
            try:
                self._server.add(self._mean, wave)
                self._added += wave
            except Exception as error:  # noqa: BLE001: what remains is tried, and told, at the end
                log(WARNING, "fedlane: the mean is begun anew: %s", error)
                with self._changed:
                    self._mean, self._added, self._early = _core.Mean(), [], False

    def _next_wave(self) -> list[Update]:
        """Updates to add while others are awaited; none when all have come, or at the end."""
        with self._changed:
            while self._awaits_more():
                if not (self._early and self._queue):
                    self._changed.wait()
                    continue
                self._changed.wait_for(lambda: not self._awaits_more(), _LINGER_S)
                if self._awaits_more() and self._early:
                    # An update without weight changes nothing.
                    wave = [update for update in self._queue if update[1] != 0]
                    self._queue.clear()
                    if wave:
                        return wave
            return []

    def _awaits_more(self) -> bool:
        return not self._closed and self._outstanding > 0


def has_room(layout: Sequence[Entry]) -> bool:
    """Whether sums can be kept beside the mean, where they are larger than what is summed."""
    if all(entry.dtype in _OWN_SUMS for entry in layout):
        return True
    # At most eight bytes for each element of one byte.
    return available_bytes() > 9 * layout_bytes(list(layout)) + RESERVE_BYTES
