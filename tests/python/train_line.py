"""A trainer for `fedlane join --train`: fits a plane to a third of the data.

Run: python train_line.py start|0|1|2|check

"start" writes an untrained FEDLANE_MODEL. A number trains FEDLANE_MODEL on that part of the data,
from the newest mean in FEDLANE_OUTPUT if there is one. "check" says whether FEDLANE_OUTPUT fits.
"""

import os
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

SLOPES = np.array([2.0, -3.0, 0.5], "<f4")
OFFSET = np.float32(1.25)


def data(part):
    """Every part sees another corner of the space, so none alone finds the plane."""
    random = np.random.default_rng(part)
    x = random.standard_normal((40, 3)).astype("<f4") * 0.1
    x[:, part] += random.standard_normal(40)
    return x, x @ SLOPES + OFFSET


def train(part, model):
    x, y = data(part)
    slopes, offset = model["slopes"].copy(), model["offset"].copy()
    for _ in range(60):
        error = x @ slopes + offset - y
        slopes -= 0.1 * (error @ x) / len(y)
        offset -= 0.1 * error.mean()
    return {"slopes": slopes.astype("<f4"), "offset": offset.astype("<f4")}


def main(what):
    output = os.environ.get("FEDLANE_OUTPUT", "")
    if what == "start":
        model = {"slopes": np.zeros(3, "<f4"), "offset": np.zeros((), "<f4")}
    elif what == "check":
        model = load_file(output)
        # Each part alone ends more than 1.9 away.
        assert abs(model["slopes"] - SLOPES).max() < 0.2, model
        assert abs(model["offset"] - OFFSET) < 0.01, model
        return
    else:
        newest = output if os.path.exists(output) else os.environ["FEDLANE_MODEL"]
        model = train(int(what), load_file(newest))
    save_file(model, os.environ["FEDLANE_MODEL"])


if __name__ == "__main__":
    main(sys.argv[1])
