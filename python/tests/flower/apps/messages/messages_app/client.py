"""Answers the messages of the ServerApp."""

import numpy as np
from probes import answer_partition, switch_mod

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[switch_mod])
app.query("partition")(answer_partition)


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    """Everything back, with the dtypes seen, and with one ArrayRecord more."""
    seen = {f"{key} {name}": f"{each.numpy().dtype.str} {each.numpy().shape}"
            for key, part in message.content.array_records.items() for name, each in part.items()}
    partition = float(context.node_config["partition-id"])
    mine = ArrayRecord({"mine": Array(np.full((31, 33), partition))})
    content = dict(message.content.items()) | {"seen": ConfigRecord(seen), "added": mine}
    return Message(RecordDict(content), reply_to=message)


@app.query("nothing")
def nothing(message: Message, context: Context) -> Message:
    if int(context.node_config["partition-id"]) == 0:
        return Message(RecordDict(), reply_to=message)
    return Message(RecordDict({"arrays": ArrayRecord()}), reply_to=message)


@app.train("keep")
def keep(message: Message, context: Context) -> Message:
    context.state["kept"] = message.content["arrays"]
    return Message(RecordDict({"ok": MetricRecord({"kept": len(context.state["kept"])})}), reply_to=message)


@app.evaluate("recall")
def recall(message: Message, context: Context) -> Message:
    return Message(RecordDict({"arrays": context.state["kept"]}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = {name: each.numpy() for name, each in message.content["arrays"].items()}
    for each in arrays.values():
        each *= 2 + int(context.node_config["partition-id"])
    return Message(RecordDict({"arrays": ArrayRecord({n: Array(a) for n, a in arrays.items()})}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    sums = {name: float(each.numpy().sum()) for name, each in message.content["arrays"].items()}
    return Message(RecordDict({"metrics": MetricRecord(sums)}), reply_to=message)
