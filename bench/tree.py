"""A tree of edges against a star of the same clients, behind a slow link; interleaved, results verified.

The top and every edge and client have a network namespace of their own, all on one switch. Edges and
clients have links of EDGE Mbit/s, the top one of a tenth of that: the upper link. In a round every
client sends MIB of f32 and gets the mean; it is over when the last client has it. The bytes are those
that the upper link's counters show.

    python bench/tree.py --edges 4 --clients 4

Needs root, iproute2 and a release build of the command line: cargo build --release -p fedlane-cli.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
#: Of all names of namespaces.
PREFIX = f"fl{os.getpid()}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="clients of each edge")
    parser.add_argument("--mib", type=int, default=16, help="MiB of f32 of each client")
    parser.add_argument("--edge-mbit", type=int, default=4000, help="rate of the links of edges and clients")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds in each run")
    parser.add_argument("--order", choices=["arrival", "client"], default="arrival")
    parser.add_argument("--fedlane", default=str(REPOSITORY / "target/release/fedlane"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Hosts on one switch."""

    def __init__(self):
        self.hosts = {}
        self.switch = self.namespace("sw")
        run("ip", "-n", self.switch, "link", "add", "name", "sw0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "sw0", "up")

    def namespace(self, name):
        name = f"{PREFIX}-{name}"
        run("ip", "netns", "add", name)
        self.hosts[name] = None
        run("ip", "netns", "exec", name, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
        return name

    def add(self, name, mbit):
        """A host with a link of that rate in each direction."""
        host = self.namespace(name)
        number = len(self.hosts)
        inside, outside = "up0", f"p{number}"
        run("ip", "-n", self.switch, "link", "add", "name", outside, "type", "veth", "peer", "name",
            inside, "netns", host)  # fmt: skip
        run("ip", "-n", self.switch, "link", "set", outside, "master", "sw0", "up")
        address = f"10.77.{number // 250}.{number % 250 + 1}"
        run("ip", "-n", host, "addr", "add", f"{address}/16", "dev", inside)
        run("ip", "-n", host, "link", "set", inside, "up")
        run("ip", "-n", host, "link", "set", "lo", "up")
        # As much as the rate brings in 4 ms may come at once: timers are no finer.
        burst = str(max(mbit * 500, 128 << 10))
        for namespace, device in ((host, inside), (self.switch, outside)):
            run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                f"{mbit}mbit", "burst", burst, "latency", "50ms")  # fmt: skip
        self.hosts[host] = (address, outside)
        return host

    def address(self, host):
        return self.hosts[host][0]

    def counters(self, host):
        """Bytes that the host has received and sent, as the switch saw them."""
        shown = run("ip", "-n", self.switch, "-j", "-s", "link", "show", "dev", self.hosts[host][1])
        stats = json.loads(shown)[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def remove(self):
        for name in self.hosts:
            subprocess.run(["ip", "netns", "del", name])


class Process:
    """A fedlane process on a host, and when each of its events came."""

    def __init__(self, args, host, *command):
        command = ["ip", "netns", "exec", host, args.fedlane, *command, "--json"]
        environment = {**os.environ, "FEDLANE_LOG": "warn"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.events = []
        self.listening = threading.Event()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append((time.monotonic(), event))
            if event["event"] == "listening":
                self.listening.set()

    def end(self):
        self.thread.join()
        return self.process.wait()


def expected(args):
    update = dict(model=None, generate=args.mib << 20, preset=None, dtype="F32", scale_exponent=0)
    count = args.edges * args.clients
    return [dict(update={**update, "seed": n + 1}, examples=10.0 * (n + 1)) for n in range(count)]


def session(args, network, top, edges, clients, shape):
    """Seconds of each measured round, and bytes on the upper link, up and down, in each."""
    rounds = args.rounds + 1
    direct = args.edges if shape == "tree" else len(clients)
    listen = f"{network.address(top)}:7733"
    before = network.counters(top)
    processes = [
        Process(args, top, "serve", "--listen", listen, "--insecure", "--clients", str(direct),
                "--rounds", str(rounds), "--topology", shape, "--order", args.order, "--expect",
                json.dumps(expected(args)))  # fmt: skip
    ]
    processes[0].listening.wait()
    above = [listen] * len(clients)
    if shape == "tree":
        for number, edge in enumerate(edges):
            own = f"{network.address(edge)}:7734"
            below = Process(args, edge, "edge", listen, "--listen", own, "--insecure", "--clients",
                            str(args.clients), "--name", f"edge-{number:02}", "--order", args.order)  # fmt: skip
            processes.append(below)
            below.listening.wait()
            above[number * args.clients : (number + 1) * args.clients] = [own] * args.clients
    members = [
        Process(args, host, "join", above[number], "--generate", f"{args.mib}MiB", "--seed",
                str(number + 1), "--examples", str(10 * (number + 1)), "--name",
                f"client-{number:02}", "--stage")  # fmt: skip
        for number, host in enumerate(clients)
    ]
    ended = [process.end() for process in processes + members]
    assert not any(ended), "a process failed"
    assert any(event.get("verified") for _, event in processes[0].events), "nothing was verified"
    received, sent = (now - then for now, then in zip(network.counters(top), before))

    def over(number):
        downloads = [
            when
            for member in members
            for when, event in member.events
            if event.get("phase") == "download" and event["round"] == number
        ]
        assert len(downloads) == len(members), "a client has no mean"
        return max(downloads)

    seconds = [over(number + 1) - over(number) for number in range(1, rounds)]
    return seconds, received / rounds, sent / rounds


def main():
    args = arguments()
    if os.geteuid() != 0:
        print("skipped: must run as root, to make network namespaces and shape their links")
        return
    for program in ("ip", "tc"):
        if not shutil.which(program):
            print(f"skipped: there is no `{program}`; install iproute2")
            return
    network = Network()
    try:
        top = network.add("top", args.edge_mbit // 10)
        edges = [network.add(f"e{n}", args.edge_mbit) for n in range(args.edges)]
        clients = [network.add(f"c{n}", args.edge_mbit) for n in range(args.edges * args.clients)]
        found = {"star": [], "tree": []}
        for _ in range(args.runs):
            for shape, measured in found.items():
                measured.append(session(args, network, top, edges, clients, shape))
    finally:
        network.remove()
    medians = {}
    for shape, measured in found.items():
        seconds = [s for run_seconds, _, _ in measured for s in run_seconds]
        medians[shape] = statistics.median(seconds)
        up, down = (statistics.median(column) for column in list(zip(*measured))[1:])
        row = dict(shape=shape, clients=len(clients), edges=args.edges if shape == "tree" else 0,
                   order=args.order, model_bytes=args.mib << 20, seconds=round(medians[shape], 3),
                   least=round(min(seconds), 3), most=round(max(seconds), 3),
                   upper_link_mbit_s=args.edge_mbit // 10, upper_link_bytes_up=int(up),
                   upper_link_bytes_down=int(down), samples=len(seconds), verified=True)  # fmt: skip
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))
    ratio = dict(against="star", times_as_fast=round(medians["star"] / medians["tree"], 2))
    print(json.dumps(ratio) if args.json else f"times_as_fast {ratio['times_as_fast']}")


if __name__ == "__main__":
    main()
