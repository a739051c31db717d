"""Sends messages of every shape and writes down what came back. Nothing in it may depend on fedlane."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
from probes import Server, in_order, pack

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

COMMON = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
# NumPy can send these too. Whatever carries them, they must come back as they went.
ODD = ["c8", "c16", ">f4", ">i8", "S3", "U2", "M8[s]"]


def array(dtype: str, shape: tuple = (2, 3)) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def record(dtypes: list[str], shape: tuple = (2, 3)) -> ArrayRecord:
    return ArrayRecord({f"array {dtype}": Array(array(dtype, shape)) for dtype in dtypes})


class Talk:
    """Sends to the first clients and gives replies in the order of partitions."""

    def __init__(self, server: Server, clients: int) -> None:
        self.grid = server.grid
        everyone = server.partitions(clients)
        self.partitions = {node: partition for node, partition in everyone.items() if partition < clients}

    def ask(self, kind: str, content: RecordDict | Callable[[int], RecordDict]) -> list[RecordDict]:
        """content: the one object that all messages share, or a function of the partition."""
        messages = [Message(content(part) if callable(content) else content, dst_node_id=node, message_type=kind)
                    for node, part in self.partitions.items()]
        replies = in_order(self.grid.send_and_receive(messages, timeout=120), self.partitions)
        return [RecordDict() if each.has_error() else each.content for each in replies]


def shown(content: RecordDict) -> dict:
    """A RecordDict as JSON."""
    return {key: pack(each) if isinstance(each, ArrayRecord) else [type(each).__name__, dict(each)]
            for key, each in content.items()}


def several_records(talk: Talk) -> list:
    """Many ArrayRecords of many dtypes beside other records, through a query; the client adds one of its own."""
    content = RecordDict({
        "one": record(COMMON), "two": record(["f4"], (0, 4)), "three": record(["f4", "i8"], ()),
        "odd": record(ODD), "big": ArrayRecord({"w": Array(array("f4", (300, 301)))}),
        "none": ArrayRecord(), "config": ConfigRecord({"text": "é", "list": [1, 2], "raw": b"\0\1"}),
        "numbers": MetricRecord({"a": 1, "b": [0.5, 1.5]}),
    })
    before = shown(content)
    replies = talk.ask("query.echo", content)
    # What the app gave away is still the app's: neither emptied nor replaced.
    return [shown(each) for each in replies] + [before == shown(content)]


def state(talk: Talk) -> list:
    """Clients keep arrays in context.state from one message, and process, to the next."""
    content = RecordDict({"arrays": record(["f4", "i8"], (50, 41))})
    first = talk.ask("train.keep", content)
    second = talk.ask("evaluate.recall", RecordDict({"nothing": ConfigRecord()}))
    return [shown(each) for each in (*first, *second)]


def replies_used(talk: Talk) -> list:
    """Arrays out of a reply are measured, pickled, copied, changed in place and sent again."""
    first, second = talk.ask("train", RecordDict({"arrays": ArrayRecord({"w": Array(array("f8", (60, 61)))})}))
    whole = pack(first["arrays"])
    fine = [len(first["arrays"]["w"].data) >= 60 * 61 * 8, first["arrays"]["w"].numpy().flags.writeable]
    copies = [pickle.loads(pickle.dumps(first["arrays"])), copy.deepcopy(first["arrays"]), first["arrays"].copy()]
    fine += [pack(each) == whole for each in (*copies, first["arrays"])]
    changed = first["arrays"]["w"].numpy()
    changed += 1
    again = RecordDict({"arrays": ArrayRecord({"w": Array(changed)})})
    sums = talk.ask("evaluate", lambda partition: second if partition else again)
    return [*fine, *(shown(each) for each in (*sums, again, second))]


def nothing(talk: Talk) -> list:
    """Replies without a record, and with an ArrayRecord without arrays."""
    replies = talk.ask("query.nothing", RecordDict({"arrays": record(["f4"])}))
    return [shown(each) for each in replies]


def pushed(talk: Talk) -> list:
    """push_messages and pull_messages without send_and_receive, and a different model for each client."""
    def content(partition: int) -> RecordDict:
        return RecordDict({"arrays": ArrayRecord({"w": Array(np.full(5000, partition + 1, np.float32))})})

    asked = [Message(content(part), dst_node_id=node, message_type="train") for node, part in talk.partitions.items()]
    waiting, replies = set(talk.grid.push_messages(asked)), []
    while waiting:
        for reply in talk.grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
    return [shown(each.content) for each in in_order(replies, talk.partitions)]


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    talk = Talk(server, int(server.config["clients"]))
    steps = [several_records, state, replies_used, nothing, pushed]
    server.save(steps={each.__name__: each(talk) for each in steps})
