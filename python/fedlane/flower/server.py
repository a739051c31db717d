"""The server's data port: models on offer, updates awaited, received and averaged."""

import os
import secrets
import threading
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord

from fedlane import _core
from fedlane.handover import Counter, Message

from . import arrays, tickets
from .memory import Memory
from .headers import header_of, layout_of


@dataclass
class Offer:
    """A model that clients may fetch, and the record that it was made from."""

    record: ArrayRecord
    contents: list[object]
    key: bytes
    parcel: _core.Parcel

    def is_of(self, record: ArrayRecord) -> bool:
        """Whether the record still holds what is on offer."""
        return self.record is record and self.contents == arrays.contents(record)


class Server:
    """The data port of one ServerApp. Thread-safe."""

    def __init__(
        self, host: str, port: int, *, deadline_s: float, streams: int | None, same_host: bool
    ) -> None:
        self.exchange = _core.Exchange(host, port, deadline_s=deadline_s, streams=streams)
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        #: Updates that were handed over on this host.
        self._local: dict[bytes, _core.Parcel | None] = {}
        self._met: set[str] = set()
        self.local_name = ""
        if same_host:
            self.local_name = f"fedlane-server-{os.getpid()}-{secrets.token_hex(16)}"
            self._counter = Counter(self.local_name, lambda: self._serve_local)

    def has_met(self, name: str) -> bool:
        """Whether a client of this name has ever come."""
        return name in self._met or self.exchange.has_met(name)

    def offer(self, record: ArrayRecord) -> Offer:
        """Puts a model on offer; the same record again is the same offer."""
        with self._lock:
            for offer in self._offers:
                if offer.is_of(record):
                    return offer
            parcel = parcel_of(record, adopt=True)
            offer = Offer(record, arrays.contents(record), tickets.new_key(), parcel)
            self.exchange.offer(offer.key, parcel)
            self._offers.append(offer)
            return offer

    def keep_offers(self, keys: set[bytes]) -> None:
        """Withdraws all other offers."""
        with self._lock:
            for offer in self._offers:
                if offer.key not in keys:
                    self.exchange.release(offer.key)
            self._offers = [offer for offer in self._offers if offer.key in keys]

    def expect(self, key: bytes) -> None:
        """Awaits the updates of one message."""
        with self._lock:
            for update in tickets.update_keys(key):
                self._local[update] = None
                self.exchange.expect(update)

    def release(self, keys: Iterable[bytes]) -> None:
        """Lets go of updates: their clients need not keep them any more."""
        with self._lock:
            for key in keys:
                self._local.pop(key, None)
                self.exchange.release(key)

    def layout(self, key: bytes) -> list[arrays.Entry]:
        """The layout of an update whose reply has come."""
        local = self._local.get(key)
        return layout_of(local.header if local else self.exchange.header(key, self.deadline_s))

    def collect(self, key: bytes) -> ArrayRecord:
        """Receives one update whole. A transfer that breaks is repeated for ``deadline_s``."""
        local = self._local.get(key)
        parcel = local or self._insist(lambda: self.exchange.collect(key, self.deadline_s))
        return record_of(parcel)

    def average(self, updates: list[tuple[bytes, float]]) -> ArrayRecord:
        """The weighted mean of updates (key, weight), in this order, while they come.

        Raises `fedlane.PeerError` with the ``key`` of the update that cannot be had.
        """
        local = [self._local.get(key) for key, _ in updates]
        if all(local):
            weights = [weight for _, weight in updates]
            return record_of(_core.average(local, weights, self.exchange.pool))
        deposits = [self._deposit(key, parcel) for (key, _), parcel in zip(updates, local) if parcel]
        mean = record_of(self._insist(lambda: self.exchange.average(updates, self.deadline_s)))
        del deposits
        return mean

    def add(self, record: ArrayRecord) -> bytes:
        """Takes an update that came Flower's own way among those that wait."""
        key, parcel = tickets.new_key(), parcel_of(record)
        with self._lock:
            self.exchange.expect(key)
            self._local[key] = parcel
        return key

    def _deposit(self, key: bytes, parcel: _core.Parcel) -> _core.Deposit:
        """Sends an update that is here already through the port, to be averaged with others."""
        address = f"127.0.0.1:{self.exchange.port}"
        return _core.Deposit(address, f"this process {key.hex()[:8]}", key, parcel, self.deadline_s)

    def _insist(self, transfer: Callable[[], _core.Parcel]) -> _core.Parcel:
        """Tries again while the client comes back: a connection may break without its end."""
        until = time.monotonic() + self.deadline_s
        while True:
            try:
                return transfer()
            except _core.PeerError:
                if time.monotonic() > until:
                    raise

    def _serve_local(self, request: dict, fd: int | None) -> Message:
        """Serves a client on this host: memory is handed over, nothing is sent."""
        try:
            key = b64decode(request["key"]) if "key" in request else b""
            self._met.add(str(request.get("name", "")))
            if request["op"] == "model":
                return self._hand_over_model(key)
            if request["op"] == "deposit" and fd is not None:
                return self._take_over_update(key, request, fd)
            raise ValueError("the server hands out models and takes updates, nothing else")
        finally:
            if fd is not None:
                os.close(fd)

    def _hand_over_model(self, key: bytes) -> Message:
        with self._lock:
            offer = next((offer for offer in self._offers if offer.key == key), None)
        if offer is None:
            raise ValueError("this model is not on offer any more")
        parcel = offer.parcel
        answer = {"header": b64encode(parcel.header).decode(), "position": parcel.position}
        return answer, parcel.fileno()

    def _take_over_update(self, key: bytes, request: dict, fd: int) -> Message:
        parcel = _core.Parcel.adopt(b64decode(request["header"]), fd, request["position"])
        with self._lock:
            if key not in self._local:
                raise ValueError("this update is not awaited any more")
            self._local[key] = parcel
        return {}, None


def parcel_of(record: ArrayRecord, *, adopt: bool = False) -> _core.Parcel:
    """The arrays of a record as a parcel; with ``adopt`` the record then stands in its memory.

    Raises `arrays.NotCarried` for a record that must go Flower's own way.
    """
    header = header_of(arrays.layout(record)[0])
    memory, position, _ = arrays.gather(record, Memory.create, adopt=adopt)
    known = _PARCELS.get(memory)
    if known is not None and (known.header, known.position) == (header, position):
        return known
    return _core.Parcel.adopt(header, memory.fd, position)


#: Parcels whose memory is that of a record: their checksums need not be made again.
_PARCELS: "weakref.WeakKeyDictionary[Memory, _core.Parcel]" = weakref.WeakKeyDictionary()


def record_of(parcel: _core.Parcel) -> ArrayRecord:
    """An `ArrayRecord` whose arrays stand in the parcel's memory, and keep it."""
    if parcel.nbytes == 0:
        return arrays.scatter(Memory.create(1), 0, layout_of(parcel.header))
    memory = Memory.adopt(os.dup(parcel.fileno()), parcel.position + parcel.nbytes)
    # Keeps the parcel, and so its memory from being used again, as long as the record's.
    _PARCELS[memory] = parcel
    return arrays.scatter(memory, parcel.position, layout_of(parcel.header))
