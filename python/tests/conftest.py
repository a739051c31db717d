"""What the tests share. Deadlines are long everywhere: no test passes because time ran out."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import fedlane
import numpy as np
import pytest

LONG_MS = 600_000


class Sending:
    """A client that is stuck in the middle of sending 64 MiB, until release() is called.

    The aggregator adds up in the order of names, so "b" is not read on before "a" has begun.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.region = fedlane.Region({"w": ("float32", (1 << 24,)), "scalar": ("float32", ())})
        self.early_view = self.region.numpy("w")
        self.early_buffer = memoryview(self.region)
        self.aggregator = fedlane.Aggregator(
            "127.0.0.1:0", clients=2, order="client", deadline_ms=LONG_MS
        )
        self.moving = threading.Event()
        self.wanted = threading.Event()
        self.served: Future = pool.submit(self._serve)
        self.other: Future = pool.submit(self._send_other)
        self.sent: Future = pool.submit(self._send)
        assert self.moving.wait(60)

    def _serve(self) -> fedlane.Region:
        with self.aggregator as aggregator:
            aggregator.gather()
            return aggregator.round()

    def _join(self, name: str, progress=None) -> fedlane.Client:
        return fedlane.Client(
            self.aggregator.address,
            name=name,
            examples=1,
            model=self.region if name == "b" else fedlane.Region(layout(self.region)),
            progress=progress,
        )

    def _send_other(self) -> None:
        with self._join("a") as client:
            for _ in client:
                assert self.wanted.wait(60)
                client.send()

    def _send(self) -> None:
        with self._join("b", progress=lambda *_: self.moving.set()) as client:
            for _ in client:
                client.send()

    def release(self) -> None:
        self.wanted.set()


def layout(region: fedlane.Region) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (region.dtype(name), region.shape(name)) for name in region.names}


@pytest.fixture
def sending():
    with ThreadPoolExecutor() as pool:
        stuck = Sending(pool)
        yield stuck
        stuck.release()
        stuck.aggregator.close()


def mean(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """The weighted mean in f64, in the arrays' dtype."""
    total = sum(a.astype(np.float64) * w for a, w in zip(arrays, weights, strict=True))
    return np.asarray(total / sum(weights)).astype(arrays[0].dtype)
