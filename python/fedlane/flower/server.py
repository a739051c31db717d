"""The server's data port: models on offer, updates awaited, received and averaged."""

import mmap
import os
import secrets
import threading
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord

from fedlane import _core, pool
from fedlane.handover import Counter, Message

from . import arrays, tickets
from .headers import header_of, layout_of
from .memory import Arena, Memory

#: Longest time that a client whose connection broke may take to come back, in seconds.
COME_BACK_S = 10.0


@dataclass(eq=False)
class Offer:
    """A model that clients may fetch, and the record that it was made from."""

    record: ArrayRecord
    contents: list[tuple[str, object]]
    key: bytes
    parcel: _core.Parcel

    def is_of(self, record: ArrayRecord) -> bool:
        """Whether the record still holds what is on offer."""
        return self.record is record and self.contents == arrays.contents(record)


class Server:
    """The data port of one ServerApp. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        deadline_s: float,
        streams: int | None,
        same_host: bool,
        max_update_bytes: int | None = None,
        tls: bool = False,
    ) -> None:
        self.exchange = _core.Exchange(
            host,
            port,
            deadline_s=deadline_s,
            streams=streams,
            max_update_bytes=max_update_bytes,
            tls=tls,
        )
        self.deadline_s = deadline_s
        #: How long a client may take to come back when its connection broke.
        self.patience_s = min(deadline_s, COME_BACK_S)
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
        self._own_host = wildcard.get(host, f"[{host}]" if ":" in host else host)
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        #: For what a strategy makes of the updates.
        self._arena = Arena(self.allocate)
        #: Updates that were handed over on this host.
        self._local: dict[bytes, _core.Parcel | None] = {}
        self._met: set[str] = set()
        self.local_name = ""
        if same_host:
            self.local_name = f"fedlane-server-{os.getpid()}-{secrets.token_hex(16)}"
            # Not kept by those who serve it: a notebook runs one simulation after the other.
            itself = weakref.ref(self)
            counter = Counter(self.local_name, lambda: Desk(server) if (server := itself()) else None)
            weakref.finalize(self, counter.close)

    def warm(self, replies: int) -> None:
        """Prepares memory for replies as large as the newest model, while they are awaited.

        A strategy may still hold the last round's.
        """
        if self._offers and replies:
            pool.warm(self.exchange.pool, self._offers[-1].parcel.nbytes, replies)

    def allocate(self, nbytes: int) -> Memory:
        """Memory for new arrays: what models of earlier rounds stood in, where there is some."""
        warm = self.exchange.pool.take(nbytes)
        mapping = mmap.mmap(warm.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory = Memory.adopt(os.dup(warm.fileno()), nbytes, mapping=mapping)
        _WARM[memory] = warm
        return memory

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
            # What a strategy makes of the updates is as large.
            arrays.configure(arena=self._arena)
            self._arena.expect(parcel.nbytes)
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

    def is_here(self, key: bytes) -> bool:
        """Whether an update was handed over, so that nothing has to be received."""
        return self._local.get(key) is not None

    def layout(self, key: bytes) -> list[arrays.Entry]:
        """The layout of an update whose reply has come."""
        local = self._local.get(key)
        return layout_of(local.header if local else self.exchange.header(key, self.patience_s))

    def collect(self, key: bytes) -> ArrayRecord:
        """Receives one update whole. A transfer that breaks is repeated."""
        local = self._local.get(key)
        parcel = local or self._insist(lambda: self.exchange.collect(key, self.patience_s))
        return record_of(parcel)

    def average(self, updates: list[tuple[bytes, float]]) -> ArrayRecord:
        """The weighted mean of updates (key, weight), in this order, while they come.

        Raises `fedlane.PeerError` with the ``key`` of the update that cannot be had.
        """
        local = [(parcel, weight) for key, weight in updates if (parcel := self._local.get(key))]
        if len(local) == len(updates):
            return record_of(_core.average(local, self.exchange.pool))
        deposits = self._deposits(updates)
        mean = record_of(self._insist(lambda: self.exchange.average(updates, self.patience_s)))
        del deposits
        return mean

    def add(self, mean: _core.Mean, updates: list[tuple[bytes, float]]) -> None:
        """Adds updates (key, weight), in this order, to a mean; an error spoils it.

        Raises as `average`.
        """
        deposits = self._deposits(updates)
        self.exchange.add(mean, updates, self.patience_s)
        del deposits

    def finish(self, mean: _core.Mean) -> ArrayRecord:
        """The mean of all updates that were added."""
        return record_of(self.exchange.finish(mean))

    def take(self, record: ArrayRecord) -> bytes:
        """Takes an update that came Flower's own way among those that wait."""
        key, parcel = tickets.new_key(), parcel_of(record)
        with self._lock:
            self.exchange.expect(key)
            self._local[key] = parcel
        return key

    def _deposits(self, updates: list[tuple[bytes, float]]) -> list[_core.Deposit]:
        """Sends updates that are here already through the port, to be averaged with others."""
        return [
            _core.Deposit(self._route(f"this process {key.hex()[:8]}"), key, parcel)
            for key, _ in updates
            if (parcel := self._local.get(key)) is not None
        ]

    def _route(self, name: str) -> _core.Route:
        """How this process reaches its own port."""
        address = f"{self._own_host}:{self.exchange.port}"
        certificate = self.exchange.certificate
        return _core.Route(address, name, deadline_s=self.deadline_s, certificate=certificate)

    def _insist(self, transfer: Callable[[], _core.Parcel]) -> _core.Parcel:
        """Tries again while the client comes back: a connection may break without its end."""
        until = None
        while True:
            try:
                return transfer()
            except _core.GoneError:
                raise
            except _core.PeerError:
                # From the first break on: until then it may have gone well for long.
                until = until or time.monotonic() + self.patience_s
                if time.monotonic() > until:
                    raise

    def offered(self, key: bytes) -> _core.Parcel:
        """The model on offer under ``key``; ValueError if there is none."""
        with self._lock:
            for offer in self._offers:
                if offer.key == key:
                    return offer.parcel
        raise ValueError("this model is not on offer any more")

    def take_over(self, key: bytes, update: _core.Parcel) -> None:
        """Takes the update of a client on this host; ValueError if nobody awaits it."""
        with self._lock:
            if key not in self._local:
                raise ValueError("this update is not awaited any more")
            self._local[key] = update

    def meet(self, name: str) -> None:
        """Notes that a client of this name has come."""
        self._met.add(name)


class Desk:
    """Serves a client on this host: memory is handed over, nothing is sent.

    As the pool's desk, one connection is about one memory. Warm memory is the server's, because an
    update stands in it until the server releases it, when its client may have ended.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lease: _core.Memory | None = None
        self._model: _core.Parcel | None = None

    def __call__(self, request: dict, fd: int | None) -> Message:
        try:
            if request["op"] == "memory":
                # The updates of others may stand in what is free.
                owner = str(request["owner"])
                self._lease = self._server.exchange.pool.take(request["nbytes"], owner)
                return {}, self._lease.fileno()
            key = b64decode(request["key"])
            self._server.meet(str(request["name"]))
            if request["op"] == "model":
                return self._hand_over(key)
            if request["op"] == "deposit":
                update = pool.parcel_of(request, fd, self._lease)
                self._server.take_over(key, update)
                return {}, None
            raise ValueError(f"the server knows no {request['op']!r}")
        finally:
            if fd is not None:
                os.close(fd)

    def _hand_over(self, key: bytes) -> Message:
        # Kept: its memory must not be used again before the client has closed this connection.
        self._model = self._server.offered(key)
        header = b64encode(self._model.header).decode()
        return {"header": header, "position": self._model.position}, self._model.fileno()

    def close(self) -> None:
        """The client needs the memory no more."""
        self._lease = None
        self._model = None


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


#: Keeps memory from being used again as long as arrays stand in it.
_WARM: "weakref.WeakKeyDictionary[Memory, _core.Memory]" = weakref.WeakKeyDictionary()

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
