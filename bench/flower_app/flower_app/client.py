"""Adds a constant to every array: the shortest training there is."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def switch_mod(message: Message, context: Context, call_next) -> Message:
    if context.run_config["mode"] == "plain":
        return call_next(message, context)
    from fedlane.flower import fedlane_mod

    return fedlane_mod(message, context, call_next)


app = ClientApp(mods=[switch_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    record = ArrayRecord()
    # One after the other, so that one array more than the two models is in memory, whoever moves them.
    for name, each in message.content["arrays"].items():
        values = each.numpy()
        values += values.dtype.type(1 + int(context.node_config["partition-id"]))
        record[name] = Array(values)
        del values
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
