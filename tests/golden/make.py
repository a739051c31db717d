"""Writes golden.json: weighted means computed by NumPy, compared bit for bit by engine/tests/golden.rs.

Run: pip install numpy ml_dtypes && python make.py

Each case holds a dtype, weights, one tensor for each client and their mean, all as the hexadecimal
digits of little-endian bytes. The rule is written out in the documentation of the reducer.
"""

import json
import math
import pathlib

import ml_dtypes
import numpy as np

ELEMENTS = 37  # odd, so that vector loops have a tail
DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
SUMMED_IN_F32 = ("F32", "F16", "BF16")
FLOATS = (*SUMMED_IN_F32, "F64")


def scale(weights, sum_type):
    """The scaled weights and their sum in the type of the accumulator."""
    if np.count_nonzero(weights) == 1:
        scaled = np.sign(weights)
    else:
        _, exponent = math.frexp(sum(weights))  # 2^(exponent-1) <= sum < 2^exponent
        scaled = np.array([math.ldexp(w, -exponent - 1) for w in weights])
    scaled = scaled.astype(sum_type)
    denominator = 0.0
    for w in scaled:
        denominator += float(w)
    return scaled, sum_type(denominator)


def mean(name, weights, tensors):
    dtype = DTYPES[name]
    sum_type = np.float32 if name in SUMMED_IN_F32 else np.float64
    scaled, denominator = scale(weights, sum_type)
    counted = [(w, x.astype(sum_type)) for w, x in zip(scaled, tensors) if w > 0]
    acc = counted[0][0] * counted[0][1]
    for w, x in counted[1:]:
        acc += w * x
    assert acc.dtype == sum_type
    if name == "BOOL":
        return 2 * acc > denominator
    quotient = acc / denominator
    if name not in FLOATS:
        limits = np.iinfo(dtype)
        rounded = [max(limits.min, min(limits.max, int(q))) for q in np.rint(quotient)]
        return np.array(rounded, dtype)
    largest = np.finfo(sum_type).max
    quotient = np.where(np.isfinite(acc), np.clip(quotient, -largest, largest), quotient)
    result = quotient.astype(dtype)
    result[np.isnan(result)] = np.copysign(dtype.type(np.nan), 1)
    return result


def tensor(random, name):
    """Random elements; the first of them are extremes."""
    dtype = DTYPES[name]
    if name == "BOOL":
        return random.random(ELEMENTS) < 0.5
    if name not in FLOATS:
        limits = np.iinfo(dtype)
        x = random.integers(limits.min, limits.max, ELEMENTS, dtype, endpoint=True)
        x[:2] = limits.min, limits.max
        x[2:20] = random.integers(0, 6, 18)
        return x
    limits = ml_dtypes.finfo(dtype)
    x = random.standard_normal(ELEMENTS).astype(dtype)
    extremes = [np.nan, np.inf, -np.inf, -0.0, 0.0, limits.max, limits.smallest_subnormal]
    x[0], x[1], x[2] = -0.0, limits.max, limits.min
    x[3:6] = random.choice(np.array(extremes, dtype), 3)
    x[6:12] = limits.smallest_subnormal * random.integers(1, 9, 6).astype(dtype)
    x[12] = limits.smallest_normal
    return x


def weight_lists(random, clients):
    # Sixteen equal weights make means of small numbers that lie halfway between two results.
    equal = np.ones(clients)
    yield equal if clients == 16 else random.integers(1, 1000, clients).astype(np.float64)
    fractions = random.random(clients)
    if clients > 1:
        fractions[clients // 2] = 0.0
    yield fractions


def hexadecimal(array):
    return np.ascontiguousarray(array).tobytes().hex()


def main():
    random = np.random.default_rng(20240229)
    cases = []
    for name in DTYPES:
        for clients in (1, 3, 16):
            for weights in weight_lists(random, clients):
                tensors = [tensor(random, name) for _ in range(clients)]
                with np.errstate(all="ignore"):
                    result = mean(name, weights, tensors)
                cases.append(
                    {
                        "dtype": name,
                        "weights": hexadecimal(weights),
                        "tensors": [hexadecimal(x) for x in tensors],
                        "mean": hexadecimal(result),
                    }
                )
    lines = ",\n".join(json.dumps(case) for case in cases)
    pathlib.Path(__file__).with_name("golden.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
