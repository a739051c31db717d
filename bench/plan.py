#!/usr/bin/env python3
"""Compares what `fedlane plan` predicts with rounds that are run over shaped links.

    bench/plan.py target/release/fedlane --mb 128 --rounds 3

Each host is a network namespace of its own, with a veth to a bridge; `tc tbf` shapes what it sends and what it
receives. Needs root. Rounds are real sessions, started by the commands that the plan names; each prints what was
predicted, the median of its rounds, and their ratio.
"""

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import tempfile

# Payload in a full frame: tbf counts the headers of Ethernet, IP and TCP too.
PAYLOAD = 1448 / 1514

# Name, up and down in Gbit/s.
HUB = ("hub", 2.0, 2.0)
SESSIONS = {
    "alike": [("a", 1.0, 1.0), ("b", 1.0, 1.0), ("c", 1.0, 1.0), ("d", 1.0, 1.0)],
    "one slow": [("a", 1.0, 1.0), ("b", 0.2, 1.0), ("c", 1.0, 1.0)],
    "slow down": [("a", 1.0, 0.3), ("b", 1.0, 0.5)],
}


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """Namespaces with shaped links to one bridge."""

    def __init__(self, hosts):
        self.prefix = f"flp{os.getpid()}"
        self.hosts = hosts
        self.names = [self.namespace("switch")] + [self.namespace(name) for name, _, _ in hosts]

    def namespace(self, name):
        return f"{self.prefix}-{name}"

    def address(self, name):
        return f"10.77.0.{1 + [host for host, _, _ in self.hosts].index(name)}"

    def __enter__(self):
        switch = self.names[0]
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for name, up, down in self.hosts:
            space, port = self.namespace(name), f"p-{name}"
            run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", space)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            self.shape(space, "eth0", up)
            self.shape(switch, port, down)
        return self

    def shape(self, space, device, gbit_s):
        rate = f"{round(gbit_s * 1000)}mbit"
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
        run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def profile(network, hosts):
    def host(name, up, down):
        return {
            "name": name, "address": network.address(name), "cores": os.cpu_count(),
            "client": name != HUB[0], "aggregator": name == HUB[0],
            "up_gbit_s": up * PAYLOAD, "down_gbit_s": down * PAYLOAD, "rtt_ms": 0.1,
        }
    return {"hosts": [host(*each) for each in hosts]}


def events(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def carry_out(network, commands, arguments, directory):
    """Starts every command in its namespace; gives what the first one, which serves, printed."""
    secret = str(directory / "door.secret")
    processes = []
    for command in commands:
        words = [secret if word == "door.secret" else word for word in command["arguments"]]
        if words[1] == "serve":
            words += ["--rounds", str(arguments.rounds), "--json"]
        else:
            place = words.index("--model")
            words[place:place + 2] = ["--generate", f"{arguments.mb}MiB", "--stage"]
        words[0] = arguments.fedlane
        space = network.namespace(command["host"])
        processes.append(subprocess.Popen(
            ["ip", "netns", "exec", space, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        if words[1] == "serve":
            # It says when it listens.
            first = processes[0].stdout.readline()
    said = first + processes[0].communicate(timeout=300)[0]
    for process in processes[1:]:
        process.communicate(timeout=60)
        assert process.returncode == 0, shlex.join(process.args)
    assert processes[0].returncode == 0, said
    return said


def seconds(said):
    """The seconds of each round, without training and without joining."""
    phases = [event for event in events(said) if event["event"] == "phase" and event["round"] > 0]
    moved = [event for event in phases if event["phase"] in ("upload", "broadcast")]
    rounds = {}
    for event in moved:
        rounds[event["round"]] = rounds.get(event["round"], 0) + event["seconds"]
    averaged = [event["seconds"] for event in events(said) if event["event"] == "averaged" and "seconds" in event]
    return list(rounds.values()) or averaged


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fedlane")
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topology", nargs="*", default=["star", "ring"])
    arguments = parser.parse_args()
    arguments.fedlane = str(pathlib.Path(arguments.fedlane).resolve())
    for name, clients in SESSIONS.items():
        hosts = [HUB, *clients]
        with tempfile.TemporaryDirectory() as directory, Network(hosts) as network:
            directory = pathlib.Path(directory)
            run(arguments.fedlane, "cert", "--secret", str(directory / "door.secret"))
            file = directory / "profile.json"
            file.write_text(json.dumps(profile(network, hosts)))
            for topology in arguments.topology:
                plan = [arguments.fedlane, "plan", "--profile", str(file), "--generate", f"{arguments.mb}MiB",
                        "--topology", topology, "--json"]
                planned = events(subprocess.run(plan, check=True, capture_output=True, text=True).stdout)
                commands = [event for event in planned if event["event"] == "command"]
                took = statistics.median(seconds(carry_out(network, commands, arguments, directory)))
                predicted = planned[0]["seconds"]
                print(json.dumps({"session": name, "topology": topology, "predicted_s": round(predicted, 3),
                                  "measured_s": round(took, 3), "ratio": round(took / predicted, 3)}), flush=True)


if __name__ == "__main__":
    main()
