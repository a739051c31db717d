#!/usr/bin/env python3
"""Measures rounds of Flower on this machine: its own path, and fedlane's, beside each other.

    python bench/flower.py --mb 1000 --clients 2

The same app runs in real deployments (SuperLink, SuperNodes, one process per app) in these modes:

    plain       Flower alone
    any         fedlane's grid and mod under Flower's FedAvg
    streaming   the same with fedlane.flower.FedAvg

Modes take turns, and each repetition of a mode has a new deployment, which first runs rounds with an empty
model. The first two rounds of a run warm up and are not counted: replies of a round are still held when those of the
next one come, so it takes two until memory is used again. Figures are medians; every result is compared,
element by element, with what it must be.

A run that leaves less than --guard-mb of memory on the machine is ended and reported as out of memory.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python" / "tests" / "flower"))

try:
    importlib.metadata.version("flwr")
except importlib.metadata.PackageNotFoundError:
    sys.exit(f"{sys.executable} has no flwr: pip install 'flwr>=1.34' numpy, and fedlane itself (pip install .)")

from harness import Deployment, DeploymentError, marked_processes  # noqa: E402

MODES = ("plain", "any", "streaming")
# What is no process of Flower's was started by fedlane's mod.
ROLE_NAMES = {"other": "pool"}
TICK = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.05
WARM_UP_ROUNDS = 2


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1000
    raise OSError("/proc/meminfo does not say MemAvailable")


class Sampler(threading.Thread):
    """Looks at all processes of a deployment 20 times a second: CPU and memory, by role."""

    def __init__(self, mark: str, guard_mb: float) -> None:
        super().__init__(daemon=True)
        self.mark, self.guard_mb = mark, guard_mb
        self.roles: dict[int, str] = {}
        self.cpu_s: dict[int, float] = {}
        self.rows: list[dict] = []
        self.out_of_memory = False
        self.ended = threading.Event()

    def run(self) -> None:
        looks = 0
        while not self.ended.wait(SAMPLE_S):
            if looks % 4 == 0:
                self.roles |= {each.pid: ROLE_NAMES.get(each.role, each.role) for each in marked_processes(self.mark)}
            looks += 1
            self.look()

    def look(self) -> None:
        rss_mb: dict[str, float] = {}
        for pid, role in list(self.roles.items()):
            if role != "cli":
                rss_mb[role] = max(rss_mb.get(role, 0), self._read(pid))
        free = available_mb()
        self.rows.append({"time": time.time(), "cpu_s": sum(self.cpu_s.values()), "rss_mb": rss_mb, "free_mb": free})
        if free < self.guard_mb and not self.out_of_memory:
            self.out_of_memory = True
            for each in marked_processes(self.mark):
                os.kill(each.pid, signal.SIGKILL)

    def _read(self, pid: int) -> float:
        """Notes the CPU time of a process, also when it has just ended; returns its resident memory."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            del self.roles[pid]
            return 0
        self.cpu_s[pid] = (int(fields[11]) + int(fields[12])) / TICK
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def between(self, begin: float, end: float) -> dict:
        """CPU seconds, largest memory of one process of each role and least free memory in a span of time."""
        rows = [row for row in self.rows if begin <= row["time"] <= end] or self.rows[-1:]
        before = [row["cpu_s"] for row in self.rows if row["time"] <= begin] or [0.0]
        roles = {role for row in rows for role in row["rss_mb"]}
        return {
            "seconds": end - begin,
            "cpu_s": rows[-1]["cpu_s"] - before[-1],
            "peak_rss_mb": {role: max(row["rss_mb"].get(role, 0) for row in rows) for role in roles},
            "min_free_mb": min(row["free_mb"] for row in rows),
        }


def measured_run(flower: Deployment, sampler: Sampler, options: argparse.Namespace, mode: str, size: int) -> list[dict]:
    """The counted rounds of one run."""
    dtype = "float16" if (mode, options.dtype) == ("plain", "bfloat16") else options.dtype
    config = {"mode": mode, "clients": options.clients, "rounds": options.rounds + WARM_UP_ROUNDS, "bytes": size, "dtype": dtype}
    begin = time.time()
    run = flower.start(HERE / "flower_app", config)
    # Looks at the guard too: a run that was ended by it never ends by itself.
    end = time.monotonic() + options.timeout_s
    while not run.ended() and not sampler.out_of_memory and time.monotonic() < end:
        time.sleep(0.1)
    if sampler.out_of_memory:
        free_mb, ran_s = min(row["free_mb"] for row in sampler.rows), time.time() - begin
        raise MemoryError(f"out of memory: {free_mb:.0f} MB left on the machine after {ran_s:.0f} s")
    result = run.json()
    if not result["verified"]:
        raise DeploymentError(f"mode {mode}: the averaged model is wrong")
    whole = sampler.between(begin, time.time())
    rounds = [sampler.between(each["begin"], each["end"]) for each in result["rounds"][WARM_UP_ROUNDS:]]
    # The ServerApp's peak may lie in the first round, or before it.
    return [each | {"peak_rss_mb": whole["peak_rss_mb"], "min_free_mb": whole["min_free_mb"]} for each in rounds]


def measure(options: argparse.Namespace, mode: str) -> tuple[list[dict], list[dict]]:
    """Rounds with an empty model, and rounds with the model, of one deployment."""
    with Deployment(clients=options.clients) as flower:
        sampler = Sampler(flower.mark, options.guard_mb)
        sampler.start()
        try:
            empty = measured_run(flower, sampler, options, mode, 0)
            return empty, measured_run(flower, sampler, options, mode, int(options.mb * 1e6))
        finally:
            sampler.ended.set()
            sampler.join()


def summary(mode: str, empty: list[dict], rounds: list[dict], problem: str) -> dict:
    """The medians of a mode, as one flat object with units in its keys."""
    row: dict = {"mode": mode, "verified": not problem and bool(rounds), "problem": problem, "rounds": len(rounds)}
    for key in ("seconds", "cpu_s") if rounds else ():
        full, without = (statistics.median(each[key] for each in part) for part in (rounds, empty))
        row |= {f"round_{key}": full, f"empty_{key}": without, f"net_{key}": full - without}
    for role in sorted({role for each in rounds for role in each["peak_rss_mb"]}):
        row[f"{role}_peak_rss_mb"] = max(each["peak_rss_mb"].get(role, 0) for each in rounds)
    if rounds:
        row["min_free_mb"] = min(each["min_free_mb"] for each in rounds)
    return row


def add_ratios(rows: list[dict]) -> None:
    """How many times less than plain Flower. What a small model adds to an empty round is noise: no ratio of that."""
    plain = next((row for row in rows if row["mode"] == "plain" and row["verified"]), None)
    for row in rows if plain else ():
        for key in ("round_seconds", "net_seconds", "net_cpu_s"):
            if key in row and plain[key] > 1:
                row[f"{key}_ratio"] = plain[key] / max(row[key], 0.1)


def show(rows: list[dict], options: argparse.Namespace) -> None:
    about = {"flwr": importlib.metadata.version("flwr"), "kernel": platform.release(), "cores": os.cpu_count(),
             "mb": options.mb, "clients": options.clients, "dtype": options.dtype, "reps": options.reps}
    for row in rows:
        if options.json:
            print(json.dumps(about | row), flush=True)
            continue
        print(f"\n{row['mode']}" + (f": {row['problem']}" if row["problem"] else ""))
        for key, value in row.items():
            if isinstance(value, float):
                print(f"  {key:24} {value:10.2f}")
    if not options.json:
        print("\n" + " ".join(f"{key}={value}" for key, value in about.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100, help="size of the model in 10^6 bytes (100)")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each run (3)")
    parser.add_argument("--reps", type=int, default=3, help="deployments of each mode (3)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--dtype", choices=("float32", "float16", "float64", "bfloat16"), default="float32",
                        help="plain Flower has no bfloat16 and gets as many bytes of float16 (float32)")
    parser.add_argument("--guard-mb", type=float, default=1500, help="end a run that leaves less memory (1500)")
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one run (1800)")
    parser.add_argument("--json", action="store_true", help="one object for each mode, one a line")
    return parser.parse_args()


def main() -> int:
    options = parse()
    parts = {mode: ([], [], []) for mode in options.modes}
    for rep in range(options.reps):
        for mode, (empty, rounds, problems) in parts.items():
            print(f"repetition {rep + 1} of {options.reps}: {mode}", file=sys.stderr, flush=True)
            if problems:
                continue
            try:
                more_empty, more = measure(options, mode)
            except (MemoryError, DeploymentError) as error:
                problems.append(str(error))
                continue
            empty += more_empty
            rounds += more
    rows = [summary(mode, empty, rounds, "".join(problems)) for mode, (empty, rounds, problems) in parts.items()]
    add_ratios(rows)
    show(rows, options)
    return 0 if all(row["verified"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
