"""Runs Flower apps on real processes: SuperLink, SuperNodes, ServerApps and ClientApps, on loopback.

    with Deployment(clients=2) as flower:
        run = flower.run(app_folder, run_config={"rounds": 2}, timeout_s=60)
        assert run.state == "finished:completed", run.logs()

Flower is taken from the environment of the running interpreter. It works with 1.34 (gRPC), with 1.40 and
later (HTTP), and with what lies between. Telemetry, the check for updates and the installation of
dependencies at run time are off, so nothing but loopback is contacted.

Every process of a deployment carries a mark in its environment. So also those that Flower detaches, and
those that a plugin starts, are found, and ended, whatever happens.
"""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
APPS = HERE / "apps"
BIN = Path(sys.executable).parent
FLOWER = tuple(int(part) for part in importlib.metadata.version("flwr").split(".")[:2])
HTTP = FLOWER >= (1, 40)

MARK = "FEDLANE_TEST_DEPLOYMENT"
ROLES = {
    "flower-superlink": "superlink",
    "flower-supernode": "supernode",
    "flower-superexec": "superexec",
    "flwr-serverapp": "serverapp",
    "flwr-simulation": "serverapp",  # which runs in it
    "flwr-clientapp": "clientapp",
    "flwr": "cli",
}
#: On a busy host, FEDLANE_TEST_PATIENCE=3 makes every limit of time three times as long.
PATIENCE = float(os.environ.get("FEDLANE_TEST_PATIENCE", "1"))
START_S = 60.0
STOP_S = 15.0 * PATIENCE


class DeploymentError(Exception):
    """Flower did not start, or did not do what it was asked; the text holds the end of every log."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a deployment.

    role: superlink, supernode, superexec, serverapp, clientapp, cli, or "other" (such as fedlane's pool).
    """

    pid: int
    parent: int
    role: str
    command: str


def marked_processes(mark: str) -> list[Process]:
    """Every living process whose environment carries the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (process := _read_process(folder, mark)):
            found.append(process)
    return found


def _read_process(folder: Path, mark: str) -> Process | None:
    try:
        if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
            return None
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    role = next((ROLES[name] for word in words[:3] if (name := os.path.basename(word)) in ROLES), "other")
    return Process(int(folder.name), int(fields[1]), role, " ".join(words))


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(true: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Waits until true() is; False when it was not in time, which is PATIENCE times timeout_s."""
    end = time.monotonic() + timeout_s * PATIENCE
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def toml_value(value: object) -> str:
    """A bool, number or string as TOML, which JSON writes alike."""
    return json.dumps(value)


def toml_key(key: str) -> str:
    """A key that is not taken apart at its dots: "fedlane" and "fedlane.port" may both be there."""
    return json.dumps(key) if "." in key else key


class Run:
    """One run of an app. `result` is the file that the app was told to write (run_config "result")."""

    def __init__(self, deployment: "Deployment", run_id: int, result: Path, earlier: set[int]) -> None:
        self.deployment = deployment
        self.run_id = run_id
        self.result = result
        #: ServerApps of runs before this one, which may not have ended yet.
        self.earlier = earlier
        self.seen = False

    def ended(self) -> bool:
        """True when the app has written its result, or when no ServerApp runs any more."""
        running = any(each.pid not in self.earlier for each in self.deployment.processes("serverapp"))
        self.seen = self.seen or running
        return self.result.exists() or (self.seen and not running)

    def wait(self, timeout_s: float) -> "Run":
        """Waits for the end of the run; raises DeploymentError with every log when it does not come in time."""
        if not wait_until(self.ended, timeout_s):
            raise DeploymentError(f"the run did not end within {timeout_s} s\n{self.logs()}")
        return self

    @property
    def state(self) -> str:
        """What Flower says of the run, for example "finished:completed" or "finished:failed"."""
        wait_until(lambda: self._state().startswith("finished"), 20, every_s=0.5)
        return self._state()

    def _state(self) -> str:
        return self.deployment.flwr("list", "--run-id", str(self.run_id))["runs"][0]["status"]

    def json(self) -> dict:
        """The result file, read as JSON; raises DeploymentError with every log when there is none."""
        if not self.result.exists():
            raise DeploymentError(f"the app ended without a result\n{self.logs()}")
        return json.loads(self.result.read_text())

    def logs(self, role: str = "") -> str:
        return self.deployment.logs(role)


class Deployment:
    """A SuperLink and its SuperNodes. All of its processes end with the `with` block.

    clients: number of SuperNodes; each gets `partition-id` (0 to clients - 1) and `num-partitions`.
    node_config: more keys for all SuperNodes, or one dict for each.
    isolation: "subprocess", where SuperLink and SuperNodes start the apps, or "process", where separate
        SuperExecs do.
    env: more environment variables of all processes.
    pythonpath: folders that the apps may import from.
    own_pools: each SuperNode has a pool of fedlane for itself, as if it ran on another host.

    After the block, `leftovers` lists what did not end by itself within 15 s of its SuperNode's end.
    """

    def __init__(
        self,
        clients: int = 2,
        *,
        node_config: dict | Sequence[dict] = (),
        isolation: str = "subprocess",
        env: dict[str, str] | None = None,
        pythonpath: Sequence[Path] = (),
        own_pools: bool = False,
    ) -> None:
        self.clients = clients
        self.own_pools = own_pools
        self.node_config = [node_config] * clients if isinstance(node_config, dict) else list(node_config)
        self.isolation = isolation
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="flower-"))
        self.env = self._environment(pythonpath) | (env or {})
        self.started: list[subprocess.Popen] = []
        self.supernodes: list[int] = []
        self.leftovers: list[Process] = []
        self.runs = 0

    def _environment(self, pythonpath: Sequence[Path]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "FLWR"))}
        (self.folder / "logs").mkdir()
        return kept | {
            MARK: self.mark,
            "FEDLANE_TEST_LOGS": str(self.folder / "logs"),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "HOME": str(self.folder / "home"),
            "NO_PROXY": "*",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{kept.get('PATH', '')}",
            "PYTHONPATH": ":".join(map(str, (HERE / "support", *pythonpath))),
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> "Deployment":
        # The default action of SIGTERM would leave every process behind.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        try:
            self._start_superlink()
            for number in range(self.clients):
                self.start_supernode(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> int:
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.env | (env or {}), cwd=self.folder, start_new_session=True,
            )
        self.started.append(process)
        return process.pid

    def _start_superlink(self) -> None:
        control, fleet, apps = ports = free_ports(3)
        command = ["flower-superlink", "--insecure", "--isolation", self.isolation, *self.superlink_options()]
        if HTTP:
            fleet = apps = control
            ports = [control]
            command += ["--host", "127.0.0.1", "--port", str(control)]
        else:
            in_between = FLOWER >= (1, 35)
            command += ["--host", "127.0.0.1", "--port", str(apps)] if in_between else [
                "--serverappio-api-address", f"127.0.0.1:{apps}"]
            command += ["--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}"]
        self.fleet = fleet
        self._write_home(control)
        self._start("superlink", command)
        # For simulations alone there is no port for SuperNodes.
        self._wait_for_ports(ports if self.clients else [control, apps])
        if self.isolation == "process":
            self._start_superexec("superexec-superlink", apps, "serverapp")

    def superlink_options(self) -> list[str]:
        """What a subclass adds to the command of the SuperLink."""
        return []

    def run_options(self) -> list[str]:
        """What a subclass adds to the command that submits an app."""
        return []

    def _write_home(self, control: int) -> None:
        (self.folder / "home").mkdir()
        (self.folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n\n'
            f'[superlink.test]\naddress = "127.0.0.1:{control}"\ninsecure = true\n')

    def start_supernode(self, number: int) -> int:
        """Starts the SuperNode of partition `number`; returns its pid."""
        port = free_ports(1)[0]
        config = {"partition-id": number, "num-partitions": self.clients}
        config |= self.node_config[number] if self.node_config else {}
        command = ["flower-supernode", "--insecure", "--isolation", self.isolation,
                   "--superlink", f"127.0.0.1:{self.fleet}",
                   "--node-config", " ".join(f"{key}={toml_value(value)}" for key, value in config.items())]
        command += ["--host", "127.0.0.1", "--port", str(port)] if HTTP else [
            "--clientappio-api-address", f"127.0.0.1:{port}"]
        env = {"FEDLANE_TEST_POOL": self.pool_name(number)} if self.own_pools else {}
        pid = self._start(f"supernode{number}", command, env)
        self.supernodes.append(pid)
        if self.isolation == "process":
            self._wait_for_ports([port])
            self._start_superexec(f"superexec{number}", port, "clientapp", env)
        return pid

    def pool_name(self, number: int) -> str:
        return f"{self.mark[:8]}-{number}"

    def pools(self, number: int | None = None) -> list[int]:
        """The pids of fedlane's pools; with `own_pools`, of the one that SuperNode `number` has."""
        own = f"FEDLANE_TEST_POOL={self.pool_name(number or 0)}".encode()
        return [each.pid for each in self.processes() if "fedlane.pool" in each.command
                and (number is None or own in Path(f"/proc/{each.pid}/environ").read_bytes())]

    def _start_superexec(self, name: str, port: int, kind: str, env: dict[str, str] | None = None) -> None:
        command = ["flower-superexec", "--insecure"]
        command += ["--runtime-api-address", f"127.0.0.1:{port}"] if HTTP else [
            "--appio-api-address", f"127.0.0.1:{port}", "--plugin-type", kind]
        self._start(name, command, env)

    def _wait_for_ports(self, ports: Sequence[int]) -> None:
        def listening() -> bool:
            if any(process.poll() is not None for process in self.started):
                raise DeploymentError(f"a process of Flower ended at its start\n{self.logs()}")
            return all(_answers(port) for port in ports)

        if not wait_until(listening, START_S):
            raise DeploymentError(f"no answer from ports {ports} within {START_S} s\n{self.logs()}")

    def flwr(self, *arguments: str) -> dict:
        """Runs the command `flwr` and returns what it prints as JSON."""
        words = [str(BIN / "flwr"), *arguments, "test", "--format", "json"]
        done = subprocess.run(words, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120 * PATIENCE)
        try:
            answer = json.loads(done.stdout[done.stdout.index("{"):])
        except ValueError:
            answer = {}
        if not answer.get("success"):
            raise DeploymentError(f"{' '.join(words)}:\n{done.stdout}{done.stderr}\n{self.logs()}")
        return answer

    def start(self, app: Path, run_config: dict | None = None, *, result: bool = True) -> Run:
        """Submits the app in a folder. With `result` its run_config gets the file to write in the key "result"."""
        self.runs += 1
        file = self.folder / f"result{self.runs}"
        config = (run_config or {}) | ({"result": str(file)} if result else {})
        words = ["--run-config", " ".join(f"{toml_key(key)}={toml_value(value)}" for key, value in config.items())]
        # A copy: Flower writes its bundle beside the app.
        copy = self.folder / f"app{self.runs}"
        shutil.copytree(app, copy, ignore=shutil.ignore_patterns("__pycache__"))
        earlier = {each.pid for each in self.processes("serverapp")}
        answer = self.flwr("run", str(copy), *(words if config else ()), *self.run_options())
        return Run(self, int(answer["run-id"]), file, earlier)

    def run(self, app: Path, run_config: dict | None = None, *, timeout_s: float, result: bool = True) -> Run:
        """Submits the app and waits for its end."""
        return self.start(app, run_config, result=result).wait(timeout_s)

    def processes(self, role: str = "") -> list[Process]:
        """The living processes of this deployment, of one role or all."""
        return [each for each in marked_processes(self.mark) if role in ("", each.role)]

    def clientapps(self, supernode: int) -> list[int]:
        """The pids of the ClientApps that run under a SuperNode, given by its pid."""
        everything = {each.pid: each for each in self.processes()}

        def ancestors(pid: int) -> Iterator[int]:
            while pid in everything:
                yield pid
                pid = everything[pid].parent

        return [pid for pid, each in everything.items() if each.role == "clientapp" and supernode in ancestors(pid)]

    def kill(self, pid: int) -> None:
        """SIGKILL for one process of this deployment."""
        if pid not in [each.pid for each in self.processes()]:
            raise DeploymentError(f"process {pid} is not a living process of this deployment")
        os.kill(pid, signal.SIGKILL)

    def logs(self, role: str = "", tail: int = 4000) -> str:
        """The end of each process's log whose name begins with role; the ServerApp's comes last."""
        files = sorted((self.folder / "logs").glob(f"{role}*.log"), key=lambda each: (each.name[:6] == "server", each))
        return "".join(f"---- {each.name}\n{each.read_text(errors='replace')[-tail:]}\n" for each in files)

    def close(self) -> None:
        """Ends every process: SuperNodes first, then the SuperLink. Kills what is left and keeps it in `leftovers`."""
        for process in reversed(self.started):
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + STOP_S
        for process in self.started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # From here on: Flower itself may have taken long to end.
        wait_until(lambda: not self.processes(), STOP_S / PATIENCE)
        self.leftovers = self.processes()
        self._kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> None:
        def none_left() -> bool:
            for each in self.processes():
                try:
                    os.kill(each.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in self.started:
                process.poll()
            return not self.processes()

        if not wait_until(none_left, 10):
            raise DeploymentError(f"cannot end {self.processes()}")


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True
