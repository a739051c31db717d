"""Compares a model file with the weighted mean of others, computed by NumPy.

Run: python check_mean.py bits|close OUTPUT EXAMPLES=FILE...

The files are those of the clients, in client order. "bits" wants the bits of the documented rule,
"close" a distance that another order of the clients can explain. The header must have the bytes of
the clients' headers, and the official library must see the same tensors.
"""

import sys

import numpy as np
from safetensors import safe_open

import model_file
from model_file import make


def check_official(output, client):
    """What the official library sees, the header aside."""
    with safe_open(output, "np") as ours, safe_open(client, "np") as theirs:
        assert ours.metadata() == theirs.metadata(), (ours.metadata(), theirs.metadata())
        assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
        for name in ours.keys():
            a, b = ours.get_slice(name), theirs.get_slice(name)
            assert a.get_dtype() == b.get_dtype(), name
            assert a.get_shape() == b.get_shape(), name
            assert list(ours.get_tensor(name).shape) == b.get_shape(), name


def check_close(name, dtype, got, weights, tensors):
    """Within what f32 sums can be off, for floats of any size."""
    exact = [x.astype(np.longdouble) for x in tensors]
    parts = [w / sum(weights) for w in weights]
    mean = sum(part * x for part, x in zip(parts, exact))
    spread = sum(part * abs(x) for part, x in zip(parts, exact))
    if dtype == "BOOL":
        assert np.array_equal(got, mean > 0.5), name
        return
    if dtype in make.FLOATS:
        ulp = np.spacing(abs(mean).astype(got.dtype)).astype(np.longdouble)
    else:
        ulp = 0.5
    unit = 2.0**-24 if dtype in make.SUMMED_IN_F32 else 2.0**-53
    tolerance = ulp + (2 * len(weights) + 6) * unit * spread
    wrong = np.flatnonzero(abs(got.astype(np.longdouble) - mean) > tolerance)
    assert wrong.size == 0, (name, dtype, wrong[:5], got[wrong[:5]], mean[wrong[:5]])


def check_bits(name, dtype, payload, weights, tensors):
    with np.errstate(all="ignore"):
        expected = make.mean(dtype, np.array(weights), tensors)
    if payload != expected.tobytes():
        got = np.frombuffer(payload, expected.dtype)
        bits = np.frombuffer(payload, "u1") != np.frombuffer(expected.tobytes(), "u1")
        wrong = np.flatnonzero(bits)[0] // expected.itemsize
        raise AssertionError(f"{name} {dtype}: {got} is not {expected}; the first is {wrong}")


def main(how, output, *clients):
    weights = [float(client.partition("=")[0]) for client in clients]
    files = [client.partition("=")[2] for client in clients]
    header, tensors = model_file.read(output)
    inputs = [model_file.read(file) for file in files]
    for file, (other, _) in zip(files, inputs):
        assert header == other, f"the header of {output} is not that of {file}"
    check_official(output, files[0])
    for name, (dtype, _, payload) in tensors.items():
        theirs = [model_file.elements(dtype, other[name][2]) for _, other in inputs]
        if how == "bits":
            check_bits(name, dtype, payload, weights, theirs)
        else:
            check_close(name, dtype, model_file.elements(dtype, payload), weights, theirs)
    print(f"{len(tensors)} tensors of {output} are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
