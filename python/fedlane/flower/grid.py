"""The server's side: a `Grid` whose messages carry tickets instead of arrays."""

import ipaddress
import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedlane import _core

from . import arrays, tickets
from .arrays import Entry
from .memory import keep_freed_memory
from .server import Server
from .streaming import StreamedMean

#: Error codes of Flower: the ClientApp could not be loaded, raised, or crashed.
_APP_FAILED = (1, 2, 8)
#: Updates received at once: more would share the same cores and links.
_COLLECTED_AT_ONCE = 4
#: How long a node that could not be served is served Flower's own way: at first, and at most. It is
#: doubled each time, because every try may cost the node its deadline.
_FIRST_DETOUR_S, _LONGEST_DETOUR_S = 60.0, 1800.0
#: Pauses between two looks for replies: the first, the longest, and the growth with waiting time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 0.05, 1.0, 0.02


@dataclass
class Settings:
    """The keys ``fedlane.*`` of the run's configuration."""

    #: Address and port to listen on; port 0 takes a free one.
    host: str = "0.0.0.0"
    port: int = 0
    #: Host name or address that clients dial, with a port where it differs; empty to find out.
    advertise: str = ""
    #: Refuse to run a message Flower's own way.
    required: bool = False
    #: Hand memory over to clients on this host instead of sending; empty: in simulations only.
    same_host: str | bool = ""
    #: Silence after which a peer is given up, in seconds.
    deadline_s: float = 30.0
    #: Data connections of each client; 0: one for each core.
    streams: int = 0
    #: Streamed means: "arrival" adds updates as replies come; "client" averages when all replies are
    #: there, in order of the node ids, so that equal rounds have equal bits.
    order: str = "arrival"
    #: Bytes of the largest update that is taken from a client; 0: what the host has memory for.
    max_update_bytes: int = 0
    #: Encrypt what the data port carries. Its certificate travels in Flower's messages.
    tls: bool = False

    @classmethod
    def of(cls, run_config: dict[str, Any]) -> "Settings":
        """Reads the configuration; an unknown key is an error that names the known ones."""
        known = {name.replace("_", "-"): name for name in cls.__dataclass_fields__}
        found = {}
        for key, value in run_config.items():
            if not key.startswith("fedlane."):
                continue
            name = key.removeprefix("fedlane.").replace("_", "-")
            if name not in known:
                options = ", ".join(f"fedlane.{name}" for name in known)
                raise ValueError(f"run configuration: there is no key {key!r}; there are {options}")
            found[known[name]] = value
            if name in ("required", "same-host", "tls") and not isinstance(value, bool) and value != "":
                raise ValueError(f"run configuration: {key} is {value!r}, not true or false")
        settings = cls(**found)
        if settings.order not in ("arrival", "client"):
            raise ValueError(f"run configuration: fedlane.order is {settings.order!r}, not arrival or client")
        return settings


@dataclass
class Pending:
    """A message whose reply has not come."""

    message: Message
    #: What was sent in its place.
    sent: Message
    #: Secret of the updates; None if it went Flower's own way.
    key: bytes | None
    #: The update stays at the client: a strategy averages it there.
    held: bool = False
    #: Secrets of the models that stand in it.
    models: frozenset[bytes] = frozenset()


@dataclass
class Detour:
    """A node that is served Flower's own way for a while."""

    #: When it is tried again, as `time.monotonic` counts.
    until_s: float
    #: How long it lasts, in seconds.
    lasts_s: float


@dataclass
class Held:
    """An update that waits at its client."""

    key: bytes
    #: Name of its record in the reply.
    name: str
    layout: list[Entry]
    #: As long as it lives, no other reply has its `id`.
    reply: Message


class FedlaneGrid(Grid):
    """Wraps Flower's grid: ``grid = FedlaneGrid(grid, context)``.

    Arrays travel over a data port of the ServerApp; everything else is Flower's. Nodes that cannot
    use it are served Flower's own way, with a warning. The run's configuration has the keys of
    `Settings`, as ``fedlane.port`` and so on.
    """

    def __init__(self, grid: Grid, context: Context) -> None:
        arrays.install()
        keep_freed_memory()
        self._grid = grid
        self._settings = Settings.of(context.run_config)
        same_host = self._settings.same_host
        if same_host == "":
            same_host = type(grid).__name__ == "InMemoryGrid"
        self._server = Server(
            self._settings.host,
            int(self._settings.port),
            deadline_s=float(self._settings.deadline_s),
            streams=int(self._settings.streams) or None,
            same_host=bool(same_host),
            max_update_bytes=int(self._settings.max_update_bytes) or None,
            tls=bool(self._settings.tls),
        )
        self._addresses = addresses(self._settings, self._server.exchange.port)
        self._pending: dict[str, Pending] = {}
        #: Message ids as the app knows them, of messages that were sent a second time.
        self._repeated: dict[str, str] = {}
        self._detours: dict[int, Detour] = {}
        self._held_messages: list[Message] = []
        self._held: dict[int, Held] = {}
        self._weigh: Callable[[Message], float] | None = None
        self._mean: StreamedMean | None = None
        #: Secrets of the models in the newest messages: the next ones mostly bring them again.
        self._newest: frozenset[bytes] = frozenset()
        encrypted = " with TLS" if self._settings.tls else ""
        log(INFO, "fedlane: data port %s%s", ", ".join(self._addresses), encrypted)

    def __getattr__(self, name: str) -> Any:
        # What a version of Flower has beyond the Grid of this one.
        if name == "_grid":
            raise AttributeError(name)  # Copied or unpickled, before there is one.
        return getattr(self._grid, name)

    def set_run(self, run: Any) -> None:
        """See `flwr.serverapp.Grid`."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """See `flwr.serverapp.Grid`."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """See `flwr.serverapp.Grid`."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """See `flwr.serverapp.Grid`."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """See `flwr.serverapp.Grid`."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages with tickets in the place of their arrays. See `flwr.serverapp.Grid`."""
        pending = [self._prepare(message) for message in messages]
        if self._held_messages:
            self._begin_mean(sum(each.held for each in pending))
        self._held_messages.clear()
        models = frozenset().union(*(each.models for each in pending))
        self._newest = models or self._newest
        self._withdraw_models(pending)
        ids = list(self._grid.push_messages([each.sent for each in pending]))
        for message_id, each in zip(ids, pending, strict=True):
            if message_id is None:
                self._forget(each)
            else:
                self._pending[message_id] = each
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have come, with their arrays. See `flwr.serverapp.Grid`."""
        replies = [self._unpack(reply, pending) for reply, pending in self._pull(message_ids)]
        self._withdraw_models()
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and waits for their replies. See `flwr.serverapp.Grid`.

        Arrays of replies are received while other replies are awaited.
        """
        until = None if timeout is None else time.monotonic() + timeout
        ids = {message_id for message_id in self.push_messages(messages) if message_id}
        self._server.warm(self._models_awaited(ids))
        del messages
        asked = set(ids)
        replies: list[Future[Message]] = []
        began = time.monotonic()
        with ThreadPoolExecutor(_COLLECTED_AT_ONCE, "fedlane-collect") as threads:
            while ids and (until is None or time.monotonic() < until):
                came = self._pull(ids)
                ids -= {reply.metadata.reply_to_message_id for reply, _ in came}
                replies += [threads.submit(self._unpack, *each) for each in came]
                if ids:
                    time.sleep(pause_s(time.monotonic() - began))
        self._give_up(asked & ids)
        self._withdraw_models()
        return [reply.result() for reply in replies]

    def _models_awaited(self, ids: Iterable[str]) -> int:
        """Models that the replies will bring; a mean that is streamed is one."""
        asked = [self._pending[each] for each in ids if each in self._pending]
        trains = [each for each in asked if each.message.metadata.message_type.startswith("train")]
        whole = sum(bool(each.models) and not each.held for each in trains)
        return whole + any(each.held for each in trains)

    def hold(self, messages: Iterable[Message], weigh: Callable[[Message], float]) -> None:
        """Lets the updates of these messages wait at their clients, for `average`.

        ``weigh`` gives the weight of a reply.
        """
        # What was not averaged in the last round never will be.
        self._server.release([held.key for held in self._held.values()])
        self._held.clear()
        self._held_messages += messages
        self._weigh = weigh

    def _begin_mean(self, expected: int) -> None:
        if self._mean is not None:
            self._mean.close()
        self._mean = StreamedMean(self._server, expected, early=self._settings.order == "arrival")

    def is_held(self, reply: Message) -> bool:
        """Whether the reply's arrays wait at the client."""
        return id(reply) in self._held

    def average(self, replies: list[Message], weights: list[float]) -> tuple[ArrayRecord, set[int]]:
        """The weighted mean of the replies' only `ArrayRecord`, and the places of those in it.

        Updates that waited are released. A client whose update cannot be had is left out, exactly
        as if it had never replied. Raises `fedlane.ModelError`, and releases nothing, for updates
        that cannot be averaged: see `unhold`.
        """
        if self._mean is None:
            raise RuntimeError("these replies were not held")
        # Nothing may be under way for it when the updates are received after all.
        self._mean.close()
        layouts = [self._layout(reply) for reply in replies]
        if any(layout != layouts[0] for layout in layouts):
            raise _core.ModelError("the updates have different layouts")
        keys = [self._key(reply) for reply in replies]
        try:
            mean, counted = self._mean.finish(list(zip(keys, weights, strict=True)))
        except _core.ModelError:
            # Those that are not held are in their replies.
            held = {each.key for each in self._held.values()}
            self._server.release(key for key in keys if key not in held)
            raise
        except BaseException:
            self._let_go(replies, keys)
            raise
        self._let_go(replies, keys)
        return mean, {place for place, key in enumerate(keys) if key in counted}

    def unhold(self, replies: list[Message]) -> list[Message]:
        """The replies with their arrays after all; without those whose update cannot be had."""
        here = []
        for reply in replies:
            held = self._held.pop(id(reply), None)
            try:
                records = {held.name: self._server.collect(held.key)} if held else {}
            except (_core.FedlaneError, ValueError) as error:
                log(WARNING, "fedlane: the update of node %s is lost: %s",
                    reply.metadata.src_node_id, error)  # fmt: skip
            else:
                reply.content = tickets.replaced(reply.content, records)
                here.append(reply)
            if held:
                self._server.release([held.key])
        return here

    def _let_go(self, replies: list[Message], keys: list[bytes]) -> None:
        self._mean = None
        self._server.release(keys)
        for reply in replies:
            self._held.pop(id(reply), None)

    def _layout(self, reply: Message) -> list[Entry]:
        held = self._held.get(id(reply))
        if held is not None:
            return held.layout
        (record,) = tickets.array_records(reply.content).values()
        try:
            return arrays.layout(record)[0]
        except arrays.NotCarried as error:
            raise _core.ModelError(str(error)) from error

    def _key(self, reply: Message) -> bytes:
        held = self._held.get(id(reply))
        if held is not None:
            return held.key
        (record,) = tickets.array_records(reply.content).values()
        return self._server.take(record)

    def _prepare(self, message: Message) -> Pending:
        """The message with tickets, unless its node is served Flower's own way."""
        tickets.refuse_own_names(message.content)
        if self._is_on_detour(message.metadata.dst_node_id):
            return Pending(message, message, None)
        records = tickets.array_records(message.content)
        replaced: dict[str, object] = {}
        models = set()
        for name, record in records.items():
            try:
                offer = self._server.offer(record)
            except arrays.NotCarried as error:
                self._warn_or_raise(f"record '{name}' goes Flower's own way: {error}")
            else:
                replaced[name] = tickets.model_ticket(offer.key, offer.parcel.nbytes)
                models.add(offer.key)
        key = tickets.new_key()
        server = self._server
        certificate = server.exchange.certificate
        order = tickets.Order(self._addresses, server.local_name, key, server.deadline_s, certificate)
        replaced[tickets.ORDER] = order.record()
        server.expect(key)
        held = any(message is each for each in self._held_messages)
        content = tickets.replaced(message.content, replaced)
        return Pending(message, copy_of(message, content), key, held, frozenset(models))

    def _pull(self, message_ids: Iterable[str]) -> list[tuple[Message, Pending | None]]:
        """Replies as they came. Those that call for Flower's own way are answered so."""
        asked = {self._repeated.get(message_id, message_id): message_id for message_id in message_ids}
        came = []
        for reply in self._grid.pull_messages(set(asked)):
            answered = reply.metadata.reply_to_message_id
            pending = self._pending.pop(answered, None)
            first = asked.get(answered, answered)
            if pending is not None and (reason := self._wants_plain(reply, pending)):
                self._begin_detour(reply)
                self._send_plain(first, pending, reason)
                continue
            if pending is not None and pending.models and not reply.has_error():
                self._detours.pop(reply.metadata.src_node_id, None)
            self._repeated.pop(first, None)
            reply.metadata.__dict__["_reply_to_message_id"] = first
            came.append((reply, pending))
        return came

    def _wants_plain(self, reply: Message, pending: Pending) -> str | None:
        """Why the message must be sent again Flower's own way, if it must."""
        if pending.key is None:
            return None
        had_tickets = bool(tickets.array_records(pending.message.content))
        if reply.has_error():
            knows_us = self._server.has_met(str(pending.sent.metadata.dst_node_id))
            if had_tickets and not knows_us and reply.error.code in _APP_FAILED:
                return f"its ClientApp failed without a word from fedlane_mod ({reply.error.reason})"
            return None
        if had_tickets and not tickets.has_word(reply.content):
            # The app ran without the arrays: what it answers is worth nothing.
            return "its ClientApp answered without a word from fedlane_mod"
        return tickets.read_refusal(reply.content)

    def _send_plain(self, message_id: str, pending: Pending, reason: str) -> None:
        node = pending.message.metadata.dst_node_id
        self._forget(pending)
        if pending.held and self._mean is not None:
            self._mean.answer(None)
        lasts_s = self._detours[node].lasts_s
        how_long = "for the rest of the run" if lasts_s == math.inf else f"for {lasts_s:.0f} s"
        self._warn_or_raise(
            f"node {node} is served Flower's own way {how_long}: {reason}. Has its ClientApp "
            f"mods=[fedlane_mod], and can it reach {' or '.join(self._addresses)}?"
        )
        again = copy_of(pending.message, pending.message.content)
        for new_id in self._grid.push_messages([again]):
            if new_id is not None:
                self._pending[new_id] = Pending(pending.message, again, None)
                self._repeated[message_id] = new_id

    def _is_on_detour(self, node: int) -> bool:
        detour = self._detours.get(node)
        return detour is not None and time.monotonic() < detour.until_s

    def _begin_detour(self, reply: Message) -> None:
        """Has the node of a reply served Flower's own way for a while."""
        node = reply.metadata.src_node_id
        last = self._detours.get(node)
        if not reply.has_error() and not tickets.has_word(reply.content):
            # The app runs without the mod, and is the same in the whole run.
            lasts_s = math.inf
        elif last is None:
            lasts_s = _FIRST_DETOUR_S
        elif self._is_on_detour(node):
            return  # This reply is to a message from before.
        else:
            lasts_s = min(2 * last.lasts_s, _LONGEST_DETOUR_S)
        self._detours[node] = Detour(time.monotonic() + lasts_s, lasts_s)

    def _warn_or_raise(self, text: str) -> None:
        if self._settings.required:
            raise RuntimeError(f"fedlane.required is set, and {text}")
        log(WARNING, "fedlane: %s", text)

    def _unpack(self, reply: Message, pending: Pending | None) -> Message:
        """The reply with its arrays, or with placeholders if they are held."""
        held = pending is not None and pending.held
        unpacked = self._unpacked(reply, pending)
        if held and not self.is_held(unpacked):
            self._answer(unpacked)
        return unpacked

    def _unpacked(self, reply: Message, pending: Pending | None) -> Message:
        if pending is None or pending.key is None:
            return reply
        if reply.has_error():
            self._forget(pending)
            return reply
        reply.content = tickets.replaced(reply.content, {tickets.ORDER: None})
        if plain := list(tickets.array_records(reply.content)):
            node = reply.metadata.src_node_id
            self._warn_or_raise(
                f"node {node} sent {', '.join(plain)} Flower's own way; its log says why"
            )
        numbers = {
            name: number
            for name, record in reply.content.items()
            if (number := tickets.read_update_ticket(record)) is not None
        }
        try:
            if pending.held and len(numbers) == 1:
                return self._hold(reply, pending.key, *numbers.popitem())
            records = {
                name: self._server.collect(tickets.update_key(pending.key, number))
                for name, number in numbers.items()
            }
        except (_core.FedlaneError, ValueError) as error:
            log(WARNING, "fedlane: the update of node %s is lost: %s",
                reply.metadata.src_node_id, error)  # fmt: skip
            self._forget(pending)
            lost = Error(code=0, reason=f"fedlane: the update could not be received: {error}")
            return answer_to(reply, lost)
        reply.content = tickets.replaced(reply.content, records)
        self._forget(pending)
        return reply

    def _hold(self, reply: Message, key: bytes, name: str, number: int) -> Message:
        update = tickets.update_key(key, number)
        layout = self._server.layout(update)
        why = (
            "the arrays of this reply wait at the client and are averaged while they arrive; use "
            "the mean that aggregate_train returns, or an unmodified strategy of Flower"
        )
        record = ArrayRecord()
        for tensor, dtype, shape in layout:
            record[tensor] = arrays.placeholder(tensor, dtype.removesuffix(arrays.FORTRAN), shape, why)
        reply.content = tickets.replaced(reply.content, {name: record})
        self._server.release(other for other in tickets.update_keys(key) if other != update)
        self._held[id(reply)] = Held(update, name, layout, reply)
        self._answer(reply, update, layout)
        return reply

    def _answer(self, reply: Message, update: bytes | None = None, layout: Sequence[Entry] = ()) -> None:
        """Tells the mean of a held message's reply."""
        if self._mean is None or self._weigh is None:
            return
        try:
            weighed = (update, self._weigh(reply)) if update else None
        except (KeyError, TypeError, ValueError):
            weighed = None  # The strategy will say what is wrong with it.
        self._mean.answer(weighed, layout)

    def _withdraw_models(self, coming: Iterable[Pending] = ()) -> None:
        """Only models that a client may still come for stay on offer."""
        awaited = (each.models for each in [*self._pending.values(), *coming])
        self._server.keep_offers(set(self._newest.union(*awaited)))

    def _give_up(self, message_ids: Iterable[str]) -> None:
        """Nobody waits for these replies any more: their updates are not kept."""
        for message_id in message_ids:
            pending = self._pending.pop(self._repeated.pop(message_id, message_id), None)
            if pending is not None:
                self._forget(pending)
                if pending.held and self._mean is not None:
                    self._mean.answer(None)

    def _forget(self, pending: Pending) -> None:
        if pending.key is not None:
            self._server.release(tickets.update_keys(pending.key))


def pause_s(waited_s: float) -> float:
    """How long to wait before the next look: short at first, never a load for the SuperLink."""
    return min(max(_FIRST_PAUSE_S, waited_s * _PAUSE_SHARE), _LONGEST_PAUSE_S)


def copy_of(message: Message, content: RecordDict) -> Message:
    """The same message with other content; Flower gives each a number of its own."""
    metadata = message.metadata
    return Message(
        content,
        metadata.dst_node_id,
        metadata.message_type,
        ttl=metadata.ttl,
        group_id=metadata.group_id,
    )


def answer_to(reply: Message, error: Error) -> Message:
    """The reply with an error in the place of its content."""
    # Not among the ways that Flower's constructor declares, but one that it knows.
    return Message(error=error, metadata=reply.metadata)  # type: ignore[call-overload]


def addresses(settings: Settings, port: int) -> list[str]:
    """Where clients may find the data port, best first."""
    if settings.advertise:
        host, colon, own_port = settings.advertise.rpartition(":")
        # Several colons without brackets are an IPv6 address.
        if colon and own_port.isdigit() and (":" not in host or host.endswith("]")):
            return [settings.advertise]
        return [joined(settings.advertise, port)]
    try:
        is_any = ipaddress.ip_address(settings.host).is_unspecified
    except ValueError:
        is_any = False
    if not is_any:
        return [joined(settings.host, port)]
    found = outward_address()
    return [joined(host, port) for host in dict.fromkeys([found, "127.0.0.1"]) if host]


def joined(host: str, port: int) -> str:
    """Host and port in one, as a URL has them."""
    return f"[{host}]:{port}" if ":" in host.strip("[]") else f"{host}:{port}"


def outward_address() -> str:
    """The address that this host has to others; empty if it has no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return ""
