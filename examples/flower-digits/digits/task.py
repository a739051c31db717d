"""A small network for handwritten digits, in NumPy: 64 pixels, 32 hidden units, 10 classes."""

import numpy as np
from sklearn.datasets import load_digits

Model = dict[str, np.ndarray]
TEST_IMAGES = 360
BATCH_IMAGES = 16


def new_model() -> Model:
    random = np.random.default_rng(0)
    return {
        "hidden.weight": (random.standard_normal((64, 32)) * 0.1).astype(np.float32),
        "hidden.bias": np.zeros(32, np.float32),
        "output.weight": (random.standard_normal((32, 10)) * 0.1).astype(np.float32),
        "output.bias": np.zeros(10, np.float32),
    }


def load() -> tuple[np.ndarray, np.ndarray]:
    """All 1797 images, in an order that is mixed and always the same, and their digits."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    return (images[order] / 16).astype(np.float32), digits[order]


def training_images(partition: int, partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """The share of one client."""
    images, digits = load()
    return images[TEST_IMAGES:][partition::partitions], digits[TEST_IMAGES:][partition::partitions]


def forward(model: Model, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden units and the probability of each digit."""
    hidden = np.maximum(images @ model["hidden.weight"] + model["hidden.bias"], 0)
    scores = hidden @ model["output.weight"] + model["output.bias"]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def train(model: Model, images: np.ndarray, digits: np.ndarray, epochs: int, rate: float, seed: int) -> None:
    """Trains the model in place."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        for batch in np.array_split(random.permutation(len(images)), len(images) // BATCH_IMAGES):
            step(model, images[batch], digits[batch], rate)


def step(model: Model, images: np.ndarray, digits: np.ndarray, rate: float) -> None:
    hidden, error = forward(model, images)
    error[np.arange(len(digits)), digits] -= 1
    error /= len(digits)
    behind = (error @ model["output.weight"].T) * (hidden > 0)
    model["output.weight"] -= rate * hidden.T @ error
    model["output.bias"] -= rate * error.sum(axis=0)
    model["hidden.weight"] -= rate * images.T @ behind
    model["hidden.bias"] -= rate * behind.sum(axis=0)


def accuracy(model: Model) -> float:
    """The share of right answers on images that no client has seen in training."""
    images, digits = load()
    _, odds = forward(model, images[:TEST_IMAGES])
    return float((odds.argmax(axis=1) == digits[:TEST_IMAGES]).mean())
