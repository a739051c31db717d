"""How a ClientApp gets models and leaves updates: through its host's pool, or the server itself.

Both are other processes of this host, asked over a Unix socket; see `fedlane.handover`. Every
memory file has a connection of its own, which is closed when nothing refers to the memory: then
its owner may use it again.
"""

import mmap
import os
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path

from flwr.common import log

from fedlane import pool
from fedlane.handover import HandoverError, Line

from .memory import Memory
from .tickets import Order

#: How long a pool may take to start, in seconds.
POOL_START_S = 20.0
#: A process with one of these in its command line is who a pool serves.
_SUPERNODE = ("flower-supernode", "flower-superexec")
#: Who started this process. One that was orphaned has another parent later, which may never end.
_PARENT = os.getppid()


class Unreachable(Exception):
    """The server cannot be reached, or has not what it promised; says why."""


class Host:
    """Serves one message. ``name`` is the client's, for the server's logs, ``run`` its run's.

    Clients of one run share warm memory on a host; those of another get it zeroed.
    """

    def __init__(self, order: Order, name: str, run: str) -> None:
        self._order = order
        self._name = name
        self._run = run
        self._lines: dict[int, Line] = {}
        self._connect: Callable[[], Line] = self._find()

    def _find(self) -> Callable[[], Line]:
        if self._order.local:
            try:
                Line.connect(self._order.local, 1.0).close()
            except OSError:
                pass  # The server runs on another host.
            else:
                return self._connect_to_server
        return connect_to_pool

    def _connect_to_server(self) -> Line:
        try:
            return Line.connect(self._order.local, 10.0)
        except OSError as error:
            raise Unreachable(f"the server on this host is gone: {error}") from error

    def model(self, key: bytes, nbytes: int) -> tuple[bytes, Memory, int]:
        """Header, memory and position of the model on offer under ``key``."""
        answer, fd, line = self._wait_for_model({"op": "model", "nbytes": nbytes, "owner": self._run}, key)
        position = answer["position"]
        if nbytes == 0:
            os.close(fd)
            return b64decode(answer["header"]), Memory.create(1), 0
        memory = Memory.adopt(fd, position + nbytes, _closer(line))
        return b64decode(answer["header"]), memory, position

    def _wait_for_model(self, request: dict, key: bytes) -> tuple[dict, int, Line]:
        began = time.monotonic()
        answer, fd, line = self._ask_server(request, key)
        if "wait" in answer:
            log(WARNING, "fedlane: this client waits until others have ended: %s", answer["wait"])
        while "wait" in answer:
            answer, fd, line = self._ask_server(request, key, line)
            if "wait" not in answer:
                log(INFO, "fedlane: this client goes on after %.0f s", time.monotonic() - began)
        if fd is None:
            line.close()
            raise Unreachable("the model came without its memory")
        return answer, fd, line

    def allocate(self, nbytes: int, *, spare: bool = False) -> Memory:
        """Warm memory for this process to write to; with ``spare``, only if there is plenty.

        Raises MemoryError, whatever the reason: there is other memory.
        """
        try:
            line = self._connect()
        except Unreachable as error:
            raise MemoryError(f"no memory of {nbytes} bytes: {error}") from error
        try:
            request = {"op": "memory", "nbytes": nbytes, "spare": spare, "owner": self._run}
            _, fd = line.ask(request)
            if fd is None:
                raise HandoverError("none came")
        except HandoverError as error:
            line.close()
            raise MemoryError(f"no memory of {nbytes} bytes: {error}") from error
        try:
            # The pages are there, and are mapped at once: a third of what single faults cost.
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            _closer(line)(fd)
            raise MemoryError(f"memory of {nbytes} bytes cannot be mapped: {error}") from error

        def close(fd: int) -> None:
            # First: the number may be another file's as soon as this one is closed.
            del self._lines[fd]
            _closer(line)(fd)

        self._lines[fd] = line
        return Memory.adopt(fd, nbytes, close, mapping)

    def deposit(self, key: bytes, header: bytes, memory: Memory, position: int) -> None:
        """Leaves an update, which stands in ``memory``, for the server to take."""
        request = {"op": "deposit", "header": b64encode(header).decode(), "position": position}
        lease = self._lines.get(memory.fd)
        _, _, line = self._ask_server(request, key, lease, None if lease else memory.fd)
        if lease is None:
            line.close()

    def _ask_server(
        self, request: dict, key: bytes, line: Line | None = None, fd: int | None = None
    ) -> tuple[dict, int | None, Line]:
        """Asks by way of the first of the server's addresses that answers."""
        request |= {
            "key": b64encode(key).decode(),
            "name": self._name,
            "deadline_s": self._order.deadline_s,
            "certificate": b64encode(self._order.certificate).decode(),
        }
        own = line is None
        line = line or self._connect()
        failure: Exception = HandoverError("the server gave no address")
        for address in self._order.addresses:
            try:
                answer, received = line.ask(request | {"address": address}, fd)
                return answer, received, line
            except HandoverError as error:
                failure = error
        if own:
            line.close()
        raise Unreachable(str(failure)) from failure


def _closer(line: Line) -> Callable[[int], None]:
    def close(fd: int) -> None:
        os.close(fd)
        line.close()

    return close


def connect_to_pool() -> Line:
    """A connection to this host's pool, which is started if there is none."""
    patience = time.monotonic() + POOL_START_S
    started = None
    while True:
        try:
            line = Line.connect(pool.name(), 10.0)
            line.ask({"op": "hello", "watch": supernode_pid()})
            return line
        except (OSError, HandoverError) as error:
            # None yet, or one that was about to end.
            if time.monotonic() > patience:
                raise Unreachable(f"the pool of this host does not start: {error}") from error
        if started is None or started.poll() is not None:
            started = _start_pool()
        time.sleep(0.02)


def _start_pool() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fedlane.pool", str(supernode_pid())],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path())},
        start_new_session=True,
        cwd="/",
    )


def import_path() -> list[str]:
    """Where another Python finds fedlane: Flower may have installed it for this run, where only it looks."""
    own = str(Path(pool.__file__).parents[1])
    return [own, *filter(None, [os.environ.get("PYTHONPATH")])]


def supernode_pid() -> int:
    """The process that outlives this one and starts the next: the SuperNode, or its SuperExec.

    This process itself when there is none: it has ended before, or is in another container.
    """
    pid = os.getpid()
    best = _PARENT if _PARENT > 1 and _PARENT == os.getppid() else pid
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read()
        except (OSError, ValueError):
            break
        if any(name in command for name in _SUPERNODE):
            best = pid
    return best
