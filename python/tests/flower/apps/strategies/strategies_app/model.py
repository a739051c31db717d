"""The models that are trained: few arrays, of many shapes and dtypes."""

import numpy as np


def floats(number: int) -> dict[str, np.ndarray]:
    """Arrays that every strategy takes: f32 and f64, a scalar, an empty one, a column-major one.

    number: different for each strategy. Flower 1.34 loses a reply that holds two equal objects, so the
    empty arrays of two strategies in one message must differ in shape.
    """
    random = np.random.default_rng(number)
    return {
        "dense.weight": random.standard_normal((96, 128)).astype(np.float32),
        "läyer/γ": np.asfortranarray(random.standard_normal((6, 4)).astype(np.float32)),
        "scale": np.array(0.5, np.float32),
        "empty": np.zeros((0, 2 + number), np.float32),
        "wide": random.standard_normal((3, 1, 11)),
    }


def mixed(number: int) -> dict[str, np.ndarray]:
    """The same with half floats and a counter, which some strategies refuse also in plain Flower."""
    random = np.random.default_rng([number, 1])
    return floats(number) | {
        "half": random.standard_normal(257).astype(np.float16),
        "steps": random.integers(0, 2**40, 5),
    }
