"""Makes up a training that depends on nothing but partition, round and array."""

import zlib

import numpy as np
from probes import answer_partition, switch_mod

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from .bundle import join, parts_of

app = ClientApp(mods=[switch_mod])
app.query("partition")(answer_partition)

CLIPPING = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod, "local": LocalDpMod(4.0, 0.1, 1.0, 0.1)}


def fake_training(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    # Different for each strategy, so that no two of them send equal arrays (see model.py).
    name_seed = zlib.crc32(message.content["config"]["name"].encode())
    arrays = {name: each.numpy() for name, each in message.content["arrays"].items()}
    for name, each in arrays.items():
        random = np.random.default_rng([partition, number, name_seed, zlib.crc32(name.encode())])
        floats = each.dtype.kind == "f"
        step = random.standard_normal(each.shape) * 0.1 if floats else random.integers(0, 2**30, each.shape)
        # In place, as many apps do: what Flower hands out is writable.
        each += np.asarray(step).astype(each.dtype)
    record = ArrayRecord({name: Array(each) for name, each in arrays.items()})
    loss = 0.5 + 0.1 * partition + 0.01 * number + name_seed / 2**40
    metrics = MetricRecord({"num-examples": 10 + 7 * partition, "train_loss": loss})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def clipped(message: Message, context: Context) -> Message:
    clip = message.content["config"]["clip"]
    np.random.seed(100 + int(context.node_config["partition-id"]))
    if not clip:
        return fake_training(message, context)
    return CLIPPING[clip](message, context, fake_training)


@app.train()
def train(message: Message, context: Context) -> Message:
    if "arrays" in message.content:
        return clipped(message, context)
    replies = {}
    for name, content in parts_of(message.content).items():
        part = Message(content, dst_node_id=message.metadata.dst_node_id, message_type="train")
        reply = clipped(part, context)
        if reply.has_error():
            raise RuntimeError(f"{name}: {reply.error.reason}")
        replies[name] = reply.content
    return Message(join(replies), reply_to=message)
