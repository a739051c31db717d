"""A model in the shape of a transformer, of any size, that can be made again tensor by tensor."""

import contextlib
from collections.abc import Iterator

import numpy as np

with contextlib.suppress(ImportError):
    import ml_dtypes  # noqa: F401: gives NumPy bfloat16

WIDTH = 2048
VOCABULARY_ROWS = 32000


def shapes(elements: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Matrices and vectors of `elements` numbers in all: an embedding, layers, and what is left."""
    width = WIDTH if elements > 100_000_000 else 256
    layer = [("attention", (width, 4 * width)), ("up", (width, 4 * width)), ("down", (4 * width, width)),
             ("norm", (width,))]
    number, left = 0, elements
    rows = min(VOCABULARY_ROWS, left // 4 // width)
    if rows:
        yield "embedding", (rows, width)
        left -= rows * width
    while left >= sum(int(np.prod(shape)) for _, shape in layer):
        for name, shape in layer:
            yield f"layer{number}.{name}", shape
            left -= int(np.prod(shape))
        number += 1
    if left:
        yield "rest", (left,)


def tensor(number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The tensor with this number: whole numbers from 0 to 250, so that the sums of half floats are exact too."""
    count = int(np.prod(shape))
    return np.resize(((np.arange(251 * 64) * 7 + number) % 251).astype(dtype), count).reshape(shape)


def model(size_bytes: int, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    elements = max(1, size_bytes // np.dtype(dtype).itemsize)
    for number, (name, shape) in enumerate(shapes(elements)):
        yield name, tensor(number, shape, dtype)
