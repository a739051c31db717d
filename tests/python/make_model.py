"""Writes a small model of many dtypes with the official safetensors library.

Run: python make_model.py FILE
"""

import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SHAPES = {
    "encoder.weight": ("float32", (96, 111)),
    "encoder.bias": ("float32", (111,)),
    "decoder.weight": ("float16", (64, 33)),
    "brain.weight": (ml_dtypes.bfloat16, (50, 70)),
    "double": ("float64", (7, 9, 2)),
    "steps": ("int64", ()),
    "bytes": ("uint8", (13,)),
    "mask": ("bool", (5, 5)),
    "empty": ("float32", (0, 4)),
}


def main(path):
    random = np.random.default_rng(7)
    tensors = {name: tensor(random, dtype, shape) for name, (dtype, shape) in SHAPES.items()}
    save_file(tensors, path, {"format": "pt", "author": "fedlane tests", "naïve": "ключ"})


def tensor(random, dtype, shape):
    if dtype == "bool":
        return random.random(shape) < 0.5
    if dtype in ("int64", "uint8"):
        return np.asarray(random.integers(0, 200, shape)).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


if __name__ == "__main__":
    main(sys.argv[1])
