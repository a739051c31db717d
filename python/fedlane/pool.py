"""The process of a host that outlives its ClientApps: ``python -m fedlane.pool PID``.

A ClientApp's process is new for every message, so what is expensive to make lives here: warm
memory, the models that came last, and updates until the server has taken them. It ends when the
processes it serves (SuperNodes) have ended and no update waits any more.
"""

import os
import resource
import select
import sys
import tempfile
import threading
import time
from base64 import b64decode, b64encode
from concurrent.futures import Future

from fedlane import _core
from fedlane.handover import Counter, Message

#: Models kept for the next message: the one being trained on and the one being evaluated.
MODELS_KEPT = 2
#: Free memory below which no model is kept for later, and no further client begins: bytes.
RESERVE_BYTES = 1 << 30
#: How long a client that may not begin yet waits before it is told why, in seconds.
TOLD_AFTER_S = 5.0
#: Free memory, beyond the reserve, above which nothing that is kept is in anybody's way: bytes.
SPARE_BYTES = 16 << 30


def name() -> str:
    """The pool's address: one for each user, network namespace and version."""
    return f"fedlane-pool-{os.getuid()}-{_core.__version__}"


def parcel_of(request: dict, fd: int | None, lease: _core.Memory | None) -> _core.Parcel:
    """The update of a request: in the file that came with it, or in memory that was lent."""
    header, position = b64decode(request["header"]), request["position"]
    if fd is not None:
        return _core.Parcel.adopt(header, fd, position)
    if lease is not None:
        return _core.Parcel.within(header, lease, position)
    raise ValueError("an update came without its memory")


def warm(memory: _core.Pool, nbytes: int, count: int) -> None:
    """Prepares memory that will soon be wanted, on a thread, if the host has plenty."""

    def work() -> None:
        try:
            if available_bytes() > 2 * nbytes * count + RESERVE_BYTES:
                memory.warm(nbytes, count)
        except _core.OutOfMemory:
            pass  # Whoever needs it will hear.

    threading.Thread(target=work, name="fedlane-warm", daemon=True).start()


def available_bytes() -> int:
    """Memory that the host can still give (MemAvailable of /proc/meminfo)."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


class Pool:
    """What all connections share."""

    def __init__(self) -> None:
        self.memory = _core.Pool()
        self._lock = threading.Condition()
        #: Models by key, least recently used first; some are being fetched.
        self._models: dict[bytes, Future[_core.Parcel]] = {}
        self._deposits: dict[bytes, _core.Deposit] = {}
        self._watched: dict[int, int] = {}
        #: Clients that were let in, and the bytes for which.
        self._promised: list[tuple[str, int]] = []

    def model(self, key: bytes, route: _core.Route, owner: str | None = None) -> _core.Parcel:
        """The model of ``key``, of the run ``owner``: kept from before, or fetched, once for all who ask."""
        with self._lock:
            known = self._models.pop(key, None)
            self._models[key] = model = known or Future()
            # Models of earlier rounds go first: their memory serves the next one.
            self._forget(MODELS_KEPT if known else 1)
        if known is None:
            self._fetch(model, key, route, owner)
            return model.result()
        # A fetch that fails does so for all who wait: one try after the other would take long.
        parcel = model.result()
        # Tells the server that this client has it, and us that the server can be reached.
        _core.call(route, key)
        return parcel

    def _fetch(self, model: Future[_core.Parcel], key: bytes, route: _core.Route, owner: str | None) -> None:
        try:
            parcel = _core.fetch(route, key, self.memory, owner)
        except Exception as error:  # noqa: BLE001: whoever waits must hear of it
            with self._lock:
                del self._models[key]
            model.set_exception(error)
            return
        model.set_result(parcel)
        # The next model comes while this one is still in use.
        warm(self.memory, parcel.nbytes, 1)
        with self._lock:
            self._forget(MODELS_KEPT)
            self._lock.notify_all()

    def _forget(self, kept: int) -> None:
        old = [key for key, model in self._models.items() if model.done()]
        for key in old[: max(0, len(old) - kept)]:
            del self._models[key]

    def deposit(self, key: bytes, route: _core.Route, parcel: _core.Parcel) -> None:
        """Keeps an update until the server has taken it."""
        _core.call(route, key)
        with self._lock:
            self._deposits[key] = _core.Deposit(route, key, parcel)

    def waiting(self) -> int:
        """Updates that the server has not released yet."""
        with self._lock:
            for key, deposit in list(self._deposits.items()):
                if deposit.is_over:
                    if deposit.failure:
                        print(f"fedlane: an update was given up: {deposit.failure}", file=sys.stderr)
                    del self._deposits[key]
            return len(self._deposits)

    def admit(self, caller: str, nbytes: int) -> str:
        """Lets a client begin, when memory is not short or no other could give some back.

        Waits for that, but not for long: returns why the client must ask again, or nothing.
        """
        until = time.monotonic() + TOLD_AFTER_S
        with self._lock:
            while self._is_crowded(caller, nbytes):
                if time.monotonic() > until:
                    return (
                        f"it needs {nbytes} bytes of memory; {self._available_bytes()} are free, less "
                        f"{RESERVE_BYTES} that are kept free and {self._promised_bytes()} that are "
                        f"promised to {len(self._promised)} clients of this host that run"
                    )
                self._lock.wait(timeout=0.2)
            self._promised.append((caller, nbytes))
            return ""

    def _is_crowded(self, caller: str, nbytes: int) -> bool:
        if any(name == caller for name, _ in self._promised):
            return False  # Two that are in would wait for each other, with their second models.
        # What others were let in for and may not have taken yet is not there.
        needed_bytes = nbytes + self._promised_bytes() + RESERVE_BYTES
        return bool(self._promised) and self._available_bytes() < needed_bytes

    def _promised_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._promised)

    def has_spare(self, nbytes: int) -> bool:
        """Whether a client can have so much memory that it does not need."""
        return self._available_bytes() > 2 * nbytes + RESERVE_BYTES

    def _available_bytes(self) -> int:
        return available_bytes() + self.memory.free_bytes

    def save_memory(self) -> None:
        """Gives back what is kept for later, when the host has little left."""
        with self._lock:
            models = (model for model in self._models.values() if model.done())
            kept_bytes = sum(model.result().nbytes for model in models) + self.memory.free_bytes
            if kept_bytes and available_bytes() < min(kept_bytes, SPARE_BYTES) + RESERVE_BYTES:
                self._forget(0)
                self.memory.trim()

    def leave(self, caller: str, nbytes: int) -> None:
        """What a client was let in for is not needed any more."""
        with self._lock:
            self._promised.remove((caller, nbytes))
            self._lock.notify_all()

    def watch(self, pid: int) -> None:
        """Lives at least as long as process ``pid``, which may have ended already."""
        with self._lock:
            if pid not in self._watched:
                try:
                    self._watched[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    pass

    def outlived(self) -> bool:
        """Whether all watched processes have ended."""
        with self._lock:
            # Unlike select, poll takes descriptors of any number.
            poller = select.poll()
            for fd in self._watched.values():
                poller.register(fd, select.POLLIN)
            ended = {fd for fd, _ in poller.poll(0)}
            for pid, fd in list(self._watched.items()):
                if fd in ended:
                    os.close(fd)
                    del self._watched[pid]
            return not self._watched


def route_of(request: dict) -> _core.Route:
    """How a request says that the server can be reached."""
    return _core.Route(
        request["address"],
        request["name"],
        deadline_s=request["deadline_s"],
        certificate=b64decode(request["certificate"]),
    )


class Desk:
    """Serves one connection, which is about one memory: a model, or what becomes an update."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._promised: tuple[str, int] | None = None
        self._lease: _core.Memory | None = None
        self._parcel: _core.Parcel | None = None

    def __call__(self, request: dict, fd: int | None) -> Message:
        try:
            return getattr(self, "_" + request["op"])(request, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _hello(self, request: dict, _fd: int | None) -> Message:
        self._pool.watch(request["watch"])
        return {"pid": os.getpid()}, None

    def _model(self, request: dict, _fd: int | None) -> Message:
        key = b64decode(request["key"])
        if self._promised is None:
            # The client will hold the model it trains and the update it makes.
            promised = request["name"], 2 * request["nbytes"]
            if why := self._pool.admit(*promised):
                return {"wait": why}, None
            self._promised = promised
        model = self._pool.model(key, route_of(request), str(request["owner"]))
        self._parcel = model
        answer = {"header": b64encode(model.header).decode(), "position": model.position}
        return answer, model.fileno()

    def _memory(self, request: dict, _fd: int | None) -> Message:
        if request.get("spare") and not self._pool.has_spare(request["nbytes"]):
            raise ValueError("the host has no memory to spare")
        # What another run's client left there is not this one's to see.
        self._lease = self._pool.memory.take(request["nbytes"], str(request["owner"]))
        return {}, self._lease.fileno()

    def _deposit(self, request: dict, fd: int | None) -> Message:
        parcel = parcel_of(request, fd, self._lease)
        self._pool.deposit(b64decode(request["key"]), route_of(request), parcel)
        return {}, None

    def close(self) -> None:
        """The client's process has ended: its memory is warm for the next one."""
        self._lease = None
        self._parcel = None
        if self._promised is not None:
            self._pool.leave(*self._promised)


def log_to_file() -> None:
    """Error output goes to a file: a SuperNode's pipe must not stay open for our sake."""
    path = os.path.join(tempfile.gettempdir(), f"{name()}.log")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # Another user may have put something there: a pipe would make us wait for its reader.
        file = os.open(path, flags | os.O_NONBLOCK, 0o600)
        if os.fstat(file).st_uid != os.getuid():
            os.close(file)
            raise PermissionError(f"{path} is another user's")
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def allow_open_files() -> None:
    """As many as the host allows: each update that waits takes a few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serves until the processes named by PID, and by those who come later, have ended."""
    pool = Pool()
    pool.watch(int(sys.argv[1]))
    log_to_file()
    allow_open_files()
    try:
        counter = Counter(name(), lambda: Desk(pool))
    except OSError:
        return  # Another pool was faster, and serves everyone.
    # In this order: each look lets go of the updates that are over.
    while pool.waiting() or not pool.outlived():
        pool.save_memory()
        time.sleep(0.25)
    counter.close()


if __name__ == "__main__":
    main()
