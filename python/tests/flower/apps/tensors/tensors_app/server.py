"""Sends state dicts of every pattern of bits, and averages a model of bf16."""

import torch
from probes import Server

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value that the dtype has, each NaN included, in more than a page."""
    bits = torch.arange(65536, dtype=torch.int32)
    whole = bits.to(torch.int16) if dtype.itemsize == 2 else bits.to(torch.uint8)
    return whole.view(dtype).reshape(256, 256)


def every_tensor() -> dict[str, torch.Tensor]:
    """Of every dtype that this version of PyTorch has: large, small, 0-d, empty, and not contiguous."""
    found = {"float32": torch.randn(70, 80), "int64": torch.tensor(7)}
    for name in DTYPES:
        if dtype := getattr(torch, name, None):
            large = patterns(dtype)
            found |= {name: large, f"{name} small": large[0, :3].clone(), f"{name} 0-d": large[3, 4].clone(),
                      f"{name} empty": large[:0].clone(), f"{name} turned": large.t()}
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differences(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    found = [f"{name} is missing on one side" for name in expected.keys() ^ actual.keys()]
    for name in expected.keys() & actual.keys():
        one, other = expected[name], actual[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name} is {other.dtype} {list(other.shape)}, not {one.dtype} {list(one.shape)}")
        elif not torch.equal(bits(one), bits(other)):
            found.append(f"{name} has other bits")
    return found


def echoes(server: Server) -> tuple[list[str], list[str]]:
    """What differs in the replies of all clients, and the dtypes that were sent."""
    state = every_tensor()
    nodes = server.partitions(int(server.config["clients"]))
    messages = [Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=node, message_type="query.echo")
                for node in nodes]
    replies = list(server.grid.send_and_receive(messages, timeout=120))
    found = [each for reply in replies for each in (
        [reply.error.reason] if reply.has_error()
        else differences(state, reply.content["arrays"].to_torch_state_dict()))]
    found += [] if len(replies) == len(nodes) else [f"{len(replies)} replies"]
    return found, sorted({str(each.dtype).removeprefix("torch.") for each in state.values()})


def averaged(server: Server) -> dict[str, torch.Tensor]:
    """A layer of bf16 after two rounds of FedAvg."""
    kind = FedAvg
    if server.config["streaming"]:
        from fedlane.flower import FedAvg as kind
    clients = int(server.config["clients"])
    strategy = kind(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    layer = torch.nn.Linear(80, 70, dtype=torch.bfloat16)
    with torch.no_grad():
        for each in layer.parameters():
            each.zero_()
    result = strategy.start(server.grid, ArrayRecord(layer.state_dict()), num_rounds=2, timeout=120)
    return result.arrays.to_torch_state_dict()


@app.main()
def main(grid: Grid, context: Context) -> None:
    server = Server(grid, context)
    different, sent = echoes(server)
    mean = averaged(server) if server.config["streaming"] else {}
    server.save(different=different, sent=sent,
                mean={name: [str(each.dtype), sorted(set(each.float().reshape(-1).tolist()))]
                      for name, each in mean.items()})
