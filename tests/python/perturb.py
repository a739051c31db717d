"""Writes a copy of a model file with other numbers, as a client that has trained would.

Run: python perturb.py INPUT OUTPUT SEED
"""

import sys

import numpy as np

import model_file
from model_file import make


def main(source, target, seed):
    random = np.random.default_rng(int(seed))
    header, tensors = model_file.read(source)
    # The official library writes the header in the order of the data.
    payloads = [perturb(random, dtype, payload) for dtype, _, payload in tensors.values()]
    model_file.write(target, header, payloads)


def perturb(random, dtype, payload):
    x = model_file.elements(dtype, payload)
    if dtype == "BOOL":
        return (x ^ (random.random(x.size) < 0.3)).astype("u1").tobytes()
    if dtype not in make.FLOATS:
        return (x + random.integers(0, 50, x.size).astype(x.dtype)).tobytes()
    noise = random.standard_normal(x.size, np.float32) * np.float32(0.01)
    return (x.astype(np.float64) * (1 + noise)).astype(x.dtype).tobytes()


if __name__ == "__main__":
    main(*sys.argv[1:])
