"""Nothing is left of what was closed."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import fedlane
import numpy as np

MODEL_BYTES = 4 << 20


def held() -> dict[str, int]:
    """Descriptors and mapped regions of this process."""
    with open("/proc/self/maps") as maps:
        regions = sum("fedlane" in line or "#" in line for line in maps)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "regions": regions}


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_session(pool: ThreadPoolExecutor) -> None:
    def take_part() -> None:
        region = fedlane.Region({"w": ("uint8", (MODEL_BYTES,))})
        with fedlane.Client(aggregator.address, name="a", examples=1, model=region) as client:
            for _ in client:
                np.from_dlpack(client.model.dlpack("w"))[0] = 1
                client.send()

    with fedlane.Aggregator("127.0.0.1:0", clients=1, rounds=2) as aggregator:
        client = pool.submit(take_part)
        aggregator.gather()
        aggregator.round()
        assert aggregator.round().numpy("w")[0] == 1
    client.result(60)


def settle(expected: dict[str, int]) -> dict[str, int]:
    """Threads that serve a connection may outlive it by a moment."""
    until = time.monotonic() + 30
    gc.collect()
    while (now := held()) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return now


def test_fifty_sessions_leave_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    with ThreadPoolExecutor(1) as pool:
        run_session(pool)
        gc.collect()
        before, resident = settle(held()), resident_bytes()
        for _ in range(50):
            run_session(pool)
            fedlane.save(fedlane.Region({"w": ("uint8", (MODEL_BYTES,))}), path)
            fedlane.load(path).dlpack("w").__dlpack__(max_version=(1, 0))
            closed = fedlane.Aggregator("127.0.0.1:0", clients=1)
            closed.close()
        assert settle(before) == before
        # One region that is kept in each turn would be 200 MiB.
        assert resident_bytes() - resident < 100 << 20
