"""Ring all-reduce of fedlane against Gloo and Open MPI's segmented ring, interleaved, results verified.

Every contender averages or sums MIB of f32 on each of N processes of this machine, over loopback TCP, in
a network namespace of its own (as root), where all sockets have the same congestion control. What is
not installed is left out, with a line that says so.

    python bench/ring.py --ranks 3 --mib 1024 --gloo-python PYTHON --mpi-python PYTHON

Needs a release build of the command line: cargo build --release -p fedlane-cli.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
#: Elements of the pattern that is summed: small whole numbers, so that f32 sums are exact.
PERIOD = 1021


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of f32 on each rank")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of every contender")
    parser.add_argument("--rounds", type=int, default=2, help="measured all-reduces in each run")
    parser.add_argument("--congestion", default="reno", help="congestion control of all sockets; a kernel may allow no other one than reno here")
    parser.add_argument("--fedlane", default=str(REPOSITORY / "target/release/fedlane"))
    parser.add_argument("--gloo-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--mpi-python", default=sys.executable, help="a Python that has mpi4py")
    parser.add_argument("--options", default="", help="more options of `fedlane demo`")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--member", choices=["gloo", "mpi"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=29511, help=argparse.SUPPRESS)
    return parser.parse_args()


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def member(args):
    """One process of Gloo or MPI: prints a line for each all-reduce. Round 0 is the warm-up."""
    import numpy

    if args.member == "gloo":
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port)
        )
        import torch
        import torch.distributed as group

        group.init_process_group("gloo", rank=args.rank, world_size=args.ranks)
        rank, barrier = args.rank, group.barrier
    else:
        from mpi4py import MPI

        rank, barrier = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.Barrier
    values = numpy.empty(args.mib << 18, numpy.float32)
    pattern = (numpy.arange(PERIOD * 256) % PERIOD).astype(numpy.float32)
    pieces = [slice(at, at + pattern.size) for at in range(0, values.size, pattern.size)]
    total = args.ranks * (args.ranks + 1) // 2
    if args.member == "gloo":
        tensor = torch.from_numpy(values)
        all_reduce = lambda: group.all_reduce(tensor)  # noqa: E731
    else:
        all_reduce = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values)  # noqa: E731
    for number in range(args.rounds + 1):
        for piece in pieces:
            values[piece] = pattern[: values[piece].size] * (rank + 1)
        barrier()
        began, used = time.monotonic(), cpu_seconds()
        all_reduce()
        ended, used = time.monotonic(), cpu_seconds() - used
        barrier()
        right = all(
            numpy.array_equal(values[piece], pattern[: values[piece].size] * total)
            for piece in pieces
        )
        row = dict(round=number, began=began, ended=ended, cpu_s=used, ok=right)
        # In one piece: mpirun mixes what its processes write.
        os.write(1, (json.dumps(row) + "\n").encode())


def summed(lines, rounds):
    """Seconds and CPU seconds of each measured round, from what all members printed."""
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert all(event["ok"] for event in events), "a result is wrong"
    measured = []
    for number in range(1, rounds + 1):
        same = [event for event in events if event["round"] == number]
        seconds = max(e["ended"] for e in same) - min(e["began"] for e in same)
        measured.append((seconds, sum(event["cpu_s"] for event in same)))
    return measured


def member_command(args, python, kind):
    return [python, __file__, "--member", kind, "--ranks", str(args.ranks), "--mib", str(args.mib),
            "--rounds", str(args.rounds)]  # fmt: skip


def run_gloo(args):
    command = member_command(args, args.gloo_python, "gloo")
    members = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(args.ranks)
    ]
    outputs = [process.communicate()[0] for process in members]
    assert all(process.returncode == 0 for process in members), "Gloo failed"
    return summed("".join(outputs).splitlines(), args.rounds)


def run_mpi(args):
    tuned = dict(coll_tuned_use_dynamic_rules=1, coll_tuned_allreduce_algorithm=5,
                 coll_tuned_allreduce_algorithm_segmentsize=1 << 20, btl="self,tcp",
                 pml="ob1", btl_tcp_if_include="lo")  # fmt: skip
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(args.ranks)]
    for key, value in tuned.items():
        command += ["--mca", key, str(value)]
    command += member_command(args, args.mpi_python, "mpi")
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return summed(output.splitlines(), args.rounds)


def run_fedlane(args):
    command = [args.fedlane, "demo", "--topology", "ring", "--json", "--clients", str(args.ranks),
               "--rounds", str(args.rounds + 1), "--generate", f"{args.mib}MiB",
               "--congestion", args.congestion, *args.options.split()]  # fmt: skip
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    events = [json.loads(line) for line in output.splitlines()]
    assert any(event.get("verified") for event in events), "nothing was verified"
    measured = []
    for number in range(2, args.rounds + 2):
        same = [event for event in events if event.get("round") == number]
        seconds = [event["seconds"] for event in same if event["process"] == "aggregator"]
        phases = [event for event in same if event.get("phase") == "all-reduce"]
        cpu = sum(event["cpu_user_s"] + event["cpu_kernel_s"] for event in phases)
        measured.append((seconds[0], cpu))
    return measured


def has(python, module):
    command = [python, "-c", f"import {module}"]
    return bool(shutil.which(python)) and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def contenders(args):
    found = {"fedlane": run_fedlane}
    if has(args.gloo_python, "torch.distributed, numpy"):
        found["gloo"] = run_gloo
    else:
        print(f"gloo is left out: {args.gloo_python} has no torch", file=sys.stderr)
    if shutil.which("mpirun") and has(args.mpi_python, "mpi4py.MPI, numpy"):
        found["mpi ring"] = run_mpi
    else:
        print("the ring of MPI is left out: no mpirun, or no mpi4py", file=sys.stderr)
    return found


def alone(args):
    """Starts again in a network of its own, where congestion control can be set for all."""
    if os.geteuid() != 0:
        sys.exit("must run as root: it sets the congestion control in a network namespace of its own")
    setup = (
        f"ip link set lo up && sysctl -q net.ipv4.tcp_congestion_control={args.congestion}"
        ' && exec "$@"'
    )
    inside = [sys.executable, *sys.argv, "--inside"]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", setup, "sh", *inside])


def main():
    args = arguments()
    if args.member:
        return member(args)
    if not args.inside:
        alone(args)
    found = contenders(args)
    samples = {name: [] for name in found}
    for _ in range(args.runs):
        for name, run in found.items():
            samples[name] += run(args)
    medians = {}
    for name, measured in samples.items():
        seconds, cpu = (statistics.median(column) for column in zip(*measured))
        medians[name] = (seconds, cpu)
        row = dict(name=name, ranks=args.ranks, bytes=args.mib << 20, seconds=round(seconds, 3),
                   least=round(min(measured)[0], 3), most=round(max(measured)[0], 3),
                   cpu_s=round(cpu, 2), samples=len(measured), congestion=args.congestion,
                   verified=True)  # fmt: skip
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))
    ours = medians.pop("fedlane")
    for name, theirs in medians.items():
        row = dict(against=name, times_as_fast=round(theirs[0] / ours[0], 2),
                   cpu_ratio=round(ours[1] / theirs[1], 2))  # fmt: skip
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
