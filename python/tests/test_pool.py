"""What memory that is lent again shows."""

import os

from fedlane import _core
from fedlane.pool import Desk, Pool

BYTES = 10_000


def test_memory_of_another_run_is_zeroed():
    pool = _core.Pool()
    memory = pool.take(BYTES, "run 1")
    os.pwrite(memory.fileno(), b"weights", 5000)
    del memory
    again = pool.take(BYTES, "run 1")
    # Its own: to make it zero would cost time for nothing.
    assert os.pread(again.fileno(), 7, 5000) == b"weights"
    del again
    other = pool.take(BYTES, "run 2")
    assert os.pread(other.fileno(), BYTES, 0) == bytes(BYTES)


def test_a_client_does_not_see_what_another_runs_client_left():
    pool = Pool()
    for run in ("1", "2"):
        desk = Desk(pool)
        _, fd = desk({"op": "memory", "nbytes": BYTES, "owner": run}, None)
        assert os.pread(fd, BYTES, 0) == bytes(BYTES), f"run {run} sees another one's update"
        os.pwrite(fd, b"an update", 0)
        desk.close()
    assert pool.memory.free_bytes == BYTES, "both had the same memory"
