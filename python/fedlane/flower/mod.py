"""The client's side: arrays come and go through fedlane, the app sees `ArrayRecord`s as ever."""

from logging import WARNING

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common import log

from . import arrays, tickets
from .headers import header_of, layout_of
from .host import Host, Unreachable
from .memory import RECORD_ALIGN_BYTES, Arena, Memory, Workspace


def fedlane_mod(message: Message, context: Context, call_next) -> Message:
    """A Flower mod: ``ClientApp(mods=[fedlane_mod])``. List it first.

    Takes the models that the message has tickets for before the app runs, and leaves the arrays
    of its reply with this host's pool, where the server takes them. A message without tickets
    passes through untouched. Raises ValueError if the reply has a record named "fedlane".
    """
    order = tickets.Order.of(message.content)
    if order is None:
        return call_next(message, context)
    host = Host(order, str(message.metadata.dst_node_id), str(message.metadata.run_id))
    try:
        message.content = unpacked(message.content, host)
    except Unreachable as error:
        log(WARNING, "fedlane: the server's data port cannot be used: %s", error)
        content = RecordDict({tickets.ORDER: tickets.refusal(str(error))})
        return Message(content, reply_to=message)
    arena, workspace = memory_for(host, message.content)
    arrays.configure(arena=arena, workspace=workspace, eager=True)
    try:
        reply = call_next(message, context)
        if reply.has_content():
            reply.content = packed(reply.content, order, host)
    finally:
        # What the app makes after this is none of this message's.
        arrays.configure(arena=Arena())
    return reply


def memory_for(host: Host, content: RecordDict) -> tuple[Arena, Workspace]:
    """Warm memory for the reply's arrays, mostly as many as came, and to work on those."""

    def allocate(nbytes: int) -> Memory:
        try:
            return host.allocate(nbytes)
        except MemoryError as error:
            log(WARNING, "fedlane: %s", error)
            return Memory.create(nbytes, sparse=True)

    records = tickets.array_records(content).values()
    sizes = [size_bytes(record) for record in records]
    arena = Arena(allocate)
    arena.expect(max(sizes, default=0))
    return arena, Workspace(lambda nbytes: host.allocate(nbytes, spare=True), sum(sizes))


def size_bytes(record: ArrayRecord) -> int:
    """Bytes of a record as it came, and what aligning each array may add."""
    try:
        return arrays.layout(record)[1] + RECORD_ALIGN_BYTES * len(record)
    except arrays.NotCarried:
        return 0  # It came Flower's own way, and so will what is made of it.


def unpacked(content: RecordDict, host: Host) -> RecordDict:
    """The content with models in the place of their tickets."""
    records: dict[str, object] = {tickets.ORDER: None}
    for name, record in content.items():
        if ticket := tickets.read_model_ticket(record):
            header, memory, position = host.model(*ticket)
            records[name] = arrays.scatter(memory, position, layout_of(header))
    return tickets.replaced(content, records)


def packed(content: RecordDict, order: tickets.Order, host: Host) -> RecordDict:
    """The content with tickets in the place of its arrays, which wait for the server."""
    tickets.refuse_own_names(content)
    records: dict[str, object] = {}
    for name, record in tickets.array_records(content).items():
        number = len(records)
        try:
            if number == tickets.MAX_UPDATES:
                raise arrays.NotCarried(f"a reply has {number} ArrayRecords before it")
            leave(record, tickets.update_key(order.key, number), host)
        except (arrays.NotCarried, Unreachable, MemoryError) as error:
            log(WARNING, "fedlane: record '%s' goes Flower's own way: %s", name, error)
        else:
            records[name] = tickets.update_ticket(number)
    return tickets.replaced(content, records | {tickets.ORDER: tickets.word()})


def leave(record: ArrayRecord, key: bytes, host: Host) -> None:
    """Leaves the arrays of one record for the server."""
    memory, position, layout = arrays.gather(record, host.allocate)
    host.deposit(key, header_of(layout), memory, position)
