"""Federated linear regression: every client holds its own data, and only the model travels.

    python linear_model.py aggregate 127.0.0.1:7733
    python linear_model.py train 127.0.0.1:7733 north
    python linear_model.py train 127.0.0.1:7733 south

Start the aggregator first. It ends after 20 rounds, when north and south know the same line.
"""

import sys

import fedlane
import numpy as np

ROUNDS = 20
STEPS_PER_ROUND = 25
LEARNING_RATE = 0.1
SLOPE, OFFSET = 2.0, -1.0


def own_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points near the line; each client sees another part of it. Shapes (100,), float32."""
    start = -1.0 if name == "north" else 0.0
    x = np.linspace(start, start + 1, 100, dtype=np.float32)
    noise = np.random.default_rng(len(name)).normal(0, 0.01, 100)
    return x, (SLOPE * x + OFFSET + noise).astype(np.float32)


def aggregate(address: str) -> None:
    model = fedlane.Region({"slope": ("float32", ()), "offset": ("float32", ())})
    with fedlane.Aggregator(address, clients=2, rounds=ROUNDS) as aggregator:
        print("listening on", aggregator.address, flush=True)
        aggregator.gather(model)
        for number in range(1, ROUNDS + 1):
            mean = aggregator.round()
            slope, offset = float(mean.numpy("slope")), float(mean.numpy("offset"))
            print(f"round {number}: y = {slope:.3f} x + {offset:.3f}", flush=True)
    fedlane.save(mean, "linear_model.safetensors")


def train(address: str, name: str) -> None:
    x, y = own_data(name)
    model = fedlane.Region({"slope": ("float32", ()), "offset": ("float32", ())})
    with fedlane.Client(address, name=name, examples=len(x), model=model) as client:
        del model
        for _ in client:
            # Views of the newest mean: what is written here is what is sent.
            slope, offset = client.model.numpy("slope"), client.model.numpy("offset")
            for _ in range(STEPS_PER_ROUND):
                error = slope * x + offset - y
                slope -= LEARNING_RATE * 2 * np.mean(error * x)
                offset -= LEARNING_RATE * 2 * np.mean(error)
            client.send()
    print(f"{name}: y = {client.model.numpy('slope'):.3f} x + {client.model.numpy('offset'):.3f}")


if __name__ == "__main__":
    {"aggregate": aggregate, "train": train}[sys.argv[1]](*sys.argv[2:])
