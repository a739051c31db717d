"""Sends back the state dict that came: as it came, or trained."""

import torch
from probes import answer_partition, switch_mod

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[switch_mod])
app.query("partition")(answer_partition)


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    state = message.content["arrays"].to_torch_state_dict()
    if not all(each.is_contiguous() or each.numel() == 0 for each in state.values()):
        raise RuntimeError("a tensor came with gaps")
    return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A layer of bf16 is loaded, changed in place and sent: 2^partition is added to each weight."""
    layer = torch.nn.Linear(80, 70, dtype=torch.bfloat16)
    layer.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        for each in layer.parameters():
            each += 2 ** int(context.node_config["partition-id"])
    content = {"arrays": ArrayRecord(layer.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
