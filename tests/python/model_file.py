"""Safetensors files as they stand on disk, for checks that must not miss a difference."""

import json
import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))

import make  # noqa: E402  the rule of the mean, written out for the golden values

# The golden values are of eight dtypes; here are the others that are averaged.
OTHERS = {"I8": "i1", "I16": "<i2", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
make.DTYPES.update({name: np.dtype(code) for name, code in OTHERS.items()})


def read(path):
    """The bytes of the header, and the tensors in the order of the header."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        data = file.read()
    tensors = {}
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return header, tensors


def elements(dtype, payload):
    """The elements of a tensor; any byte but zero is true."""
    if dtype == "BOOL":
        return np.frombuffer(payload, "u1") != 0
    return np.frombuffer(payload, make.DTYPES[dtype])


def write(path, header, payloads):
    """Writes a file with the given header; the payloads are in the order of the data."""
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for payload in payloads:
            file.write(payload)
