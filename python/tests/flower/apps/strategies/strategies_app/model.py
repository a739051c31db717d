"""The models that are trained: arrays of many shapes and dtypes."""

import numpy as np


def floats() -> dict[str, np.ndarray]:
    """Arrays that every strategy takes: f32 and f64, a scalar, an empty one, a column-major one."""
    random = np.random.default_rng(7)
    return {
        "dense.weight": random.standard_normal((96, 128)).astype(np.float32),
        "dense.bias": random.standard_normal(128).astype(np.float32),
        "läyer/γ": random.standard_normal((3, 1, 5)).astype(np.float32),
        "scale": np.array(0.5, np.float32),
        "empty": np.zeros((0, 7), np.float32),
        "columns": np.asfortranarray(random.standard_normal((6, 4)).astype(np.float32)),
        "wide": random.standard_normal(33),
    }


def mixed() -> dict[str, np.ndarray]:
    """The same with half floats and counters, which some strategies refuse also in plain Flower."""
    random = np.random.default_rng(8)
    return floats() | {
        "half": random.standard_normal(257).astype(np.float16),
        "steps": np.arange(5, dtype=np.int64),
        "step": np.array(3, np.int64),
    }
