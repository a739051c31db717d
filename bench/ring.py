"""All-reduce of fedlane, in a ring and a chain, against Gloo and Open MPI's segmented ring, interleaved,
results verified.

Two more rows say how much more could be had: what the same bytes take over plain sockets that keep
all cores busy (`fedlane bench raw`: nothing is added up there, or kept), and how fast a model is averaged that no
member holds, generated as it is sent (--larger, with 2 GiB of memory for each member).

Every contender averages or sums MIB of f32 on each of N processes of this machine, over loopback TCP, in
a network namespace of its own (as root), where all sockets have the same congestion control. What is
not installed is left out, with a line that says so.

    python bench/ring.py --ranks 3 --mib 1024 --gloo-python PYTHON --mpi-python PYTHON

Needs a release build of the command line: cargo build --release -p fedlane-cli.
"""

import argparse
import functools
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
TOPOLOGIES = ["ring", "chain"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of f32 on each rank")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of every contender")
    parser.add_argument("--larger", default="15GB", help="size of a model larger than memory; 0 for none")
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


def events_of(command):
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def demo(args, topology, rounds, *options):
    command = [args.fedlane, "demo", "--topology", topology, "--json", "--clients", str(args.ranks),
               "--rounds", str(rounds), "--congestion", args.congestion, *options,
               *args.options.split()]  # fmt: skip
    events = events_of(command)
    assert any(event.get("verified") for event in events), "nothing was verified"
    return events


def run_fedlane(args, topology):
    events = demo(args, topology, args.rounds + 1, "--generate", f"{args.mib}MiB")
    measured = []
    for number in range(2, args.rounds + 2):
        same = [event for event in events if event.get("round") == number]
        seconds = [event["seconds"] for event in same if event["process"] == "aggregator"]
        phases = [event for event in same if event.get("phase") == "all-reduce"]
        cpu = sum(event["cpu_user_s"] + event["cpu_kernel_s"] for event in phases)
        measured.append((seconds[0], cpu))
    return measured


def hops_gbit_s(args):
    """Speed of plain sockets between as many processes as keep all cores busy."""
    command = [args.fedlane, "bench", "raw", "--json", "--runs", "3", "--clients", "2",
               "--bytes", f"{args.mib}MiB", "--congestion", args.congestion]  # fmt: skip
    return next(event["goodput_gbit_s"] for event in events_of(command) if event["event"] == "median")


def print_row(args, **row):
    print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


def print_hops(args, topology, seconds):
    """How near an all-reduce comes to its hops alone: 2 (N - 1) models, in a ring as in a chain."""
    gbit_s = hops_gbit_s(args)
    hops = 2 * (args.ranks - 1) * (args.mib << 20) * 8 / gbit_s / 1e9
    print_row(args, name=f"fedlane {topology}", raw_gbit_s=round(gbit_s, 1),
              hops_seconds=round(hops, 3), of_raw_speed=round(hops / seconds, 2))  # fmt: skip


def print_larger(args, topology, seconds):
    """A model that no member holds: its rate, and most memory of any process."""
    events = demo(args, topology, 1, "--generate", args.larger, "--memory", "2GiB")
    phases = [event for event in events if event.get("phase") == "all-reduce"]
    model_bytes = next(event["bytes"] for event in events if event["event"] == "demo")
    larger = max(event["seconds"] for event in phases)
    rate = model_bytes / larger / ((args.mib << 20) / seconds)
    rss = max(event.get("peak_rss_bytes") or 0 for event in events)
    print_row(args, name=f"fedlane {topology}", bytes=model_bytes, seconds=round(larger, 2),
              gb_s=round(model_bytes / larger / 1e9, 2), of_rate_in_memory=round(rate, 2),
              peak_rss_mb=rss // 10**6, verified=True)  # fmt: skip


def has(python, module):
    command = [python, "-c", f"import {module}"]
    return bool(shutil.which(python)) and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def contenders(args):
    found = {
        f"fedlane {topology}": functools.partial(run_fedlane, topology=topology)
        for topology in TOPOLOGIES
    }
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
        print_row(args, name=name, ranks=args.ranks, bytes=args.mib << 20,
                  seconds=round(seconds, 3), least=round(min(measured)[0], 3),
                  most=round(max(measured)[0], 3), cpu_s=round(cpu, 2), samples=len(measured),
                  congestion=args.congestion, verified=True)  # fmt: skip
    for topology in TOPOLOGIES:
        ours = medians.pop(f"fedlane {topology}")
        for name, theirs in medians.items():
            if not name.startswith("fedlane"):
                print_row(args, name=f"fedlane {topology}", against=name,
                          times_as_fast=round(theirs[0] / ours[0], 2),
                          cpu_ratio=round(ours[1] / theirs[1], 2))  # fmt: skip
        print_hops(args, topology, ours[0])
        if args.larger != "0":
            print_larger(args, topology, ours[0])


if __name__ == "__main__":
    main()
