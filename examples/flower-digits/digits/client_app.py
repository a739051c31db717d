"""Trains on the images of one client."""

from fedlane.flower import fedlane_mod
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import accuracy, train, training_images

app = ClientApp(mods=[fedlane_mod])


@app.train()
def fit(message: Message, context: Context) -> Message:
    model = {name: each.numpy() for name, each in message.content["arrays"].items()}
    node, config = context.node_config, context.run_config
    images, digits = training_images(node["partition-id"], node["num-partitions"])
    train(model, images, digits, config["epochs"], config["learning-rate"], seed=node["partition-id"])
    arrays = ArrayRecord({name: Array(each) for name, each in model.items()})
    metrics = MetricRecord({"num-examples": len(images)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = {name: each.numpy() for name, each in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 1, "accuracy": accuracy(model)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
