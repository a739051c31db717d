"""Memory files: bytes that another process can be handed without a copy.

`Memory` is one memory file. `Views` lends writable views of it that are independent of each other.
`Arena` puts one array behind the other, so that a whole record stands in one file, in order.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

CHUNK_BYTES = 64 << 20  # smallest memory an arena asks for: a model of small layers still fits in one
HEADROOM_BYTES = 64 << 10  # room behind a record's large arrays for its small ones
OWN_MEMORY_BYTES = 1 << 20  # a record of this size shares its memory with no later one, so both die alone
CHECKED_BYTES = 1 << 20  # below this, asking whether memory is available costs more than it tells
MAX_MAPPINGS = 16  # of one record; later views are copies, so a process cannot run out of mappings
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
RECORD_ALIGN_BYTES = 64  # where a record begins; inside it there are no holes


class _Bytes(np.ndarray):
    """The bytes of a mapped memory file. Every view of it keeps it, and so the memory, alive."""

    memory: Memory


class Memory:
    """One memory file: `fd`, `nbytes` long, of which the first `used` bytes are written.

    What is written never changes while the object lives; `append` writes behind it. The file is
    closed, or given to `on_close`, when neither the object nor a mapping of it is referenced.
    """

    __slots__ = ("__weakref__", "_lock", "_mapping", "_pid", "_shared", "fd", "nbytes", "used")

    def __init__(
        self,
        fd: int,
        nbytes: int,
        used: int,
        on_close: Callable[[int], Any] | None,
        mapping: mmap.mmap | None,
    ) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.used = used
        self._lock = threading.Lock()
        self._mapping = mapping
        self._pid = os.getpid()
        self._shared: weakref.ref[_Bytes] | None = None
        weakref.finalize(self, _close, fd, self._pid, on_close).atexit = False

    @classmethod
    def create(cls, nbytes: int, *, sparse: bool = False) -> Memory:
        """Make a memory file of `nbytes` bytes, all there unless `sparse`.

        A sparse file takes memory when it is written through `append`, and lack of memory is an
        error then. Raises ValueError for a size below 1, MemoryError if there is too little memory.
        """
        if nbytes < 1:
            raise ValueError(f"a memory file needs at least 1 byte, not {nbytes}")
        if not sparse:
            _check_available(nbytes)
        fd = os.memfd_create("fedlane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Nobody who is handed the file can shorten it under our mappings (that would be SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            if not sparse:
                os.posix_fallocate(fd, 0, nbytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise MemoryError(f"cannot make a memory file of {nbytes} bytes: {error}") from error
        return cls(fd, nbytes, 0, None, None)

    @classmethod
    def adopt(
        cls,
        fd: int,
        nbytes: int,
        on_close: Callable[[int], Any] | None = None,
        mapping: mmap.mmap | None = None,
    ) -> Memory:
        """Take over `fd`, a file of at least `nbytes` bytes that are all written.

        `on_close(fd)` gets the file back instead of it being closed; it may be called in any thread.
        `mapping` is a writable shared mapping of the file that its owner keeps from one use to the
        next: writing through it costs a third of `pwrite`. Raises ValueError, and leaves `fd` to
        the caller, if the file is shorter.
        """
        if nbytes < 1:
            raise ValueError(f"a memory file needs at least 1 byte, not {nbytes}")
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise ValueError(
                f"memory file {fd} has {size} bytes, {nbytes} were announced: ask the sender again"
            )
        if mapping is not None and len(mapping) < nbytes:
            raise ValueError(f"the mapping of memory file {fd} has {len(mapping)} bytes, not {nbytes}")
        return cls(fd, nbytes, nbytes, on_close, mapping)

    def shared(self) -> np.ndarray:
        """All bytes, uint8, writable; writes are seen by every holder of the file."""
        with self._lock:
            view = self._shared() if self._shared is not None else None
            if view is None:
                view = self._view(self._mapping or self._map(mmap.MAP_SHARED))
                # Weak: a strong one would be a cycle, and the memory would wait for the collector.
                self._shared = weakref.ref(view)
            return view

    def private(self) -> np.ndarray:
        """All bytes, uint8, writable, in a new mapping: writes stay in it (copy on write)."""
        return self._view(self._map(mmap.MAP_PRIVATE))

    def append(self, payload: bytes | memoryview | np.ndarray, at: int | None = None) -> int | None:
        """Write `payload` (bytes, or as a uint8 array) behind what is written and return its offset.

        Returns None if there is no room, or if `at` is given and the written part does not end
        there. Raises MemoryError if the machine has too little memory.
        """
        with self._lock:
            offset = self.used
            # A forked child has the same file but its own `used`: it must not write.
            if self._pid != os.getpid() or at not in (None, offset) or self.nbytes - offset < len(payload):
                return None
            self._write(payload, offset)
            self.used = offset + len(payload)
            return offset

    def align(self) -> None:
        """Let the next `append` begin on an aligned offset."""
        with self._lock:
            self.used = min(self.nbytes, -(-self.used // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES)

    def read_into(self, target: np.ndarray, offset: int) -> None:
        """Copy `len(target)` bytes from `offset` on into `target`, a uint8 array."""
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done:].data], offset + done)
            if count == 0:
                raise OSError(f"memory file {self.fd} ends at byte {offset + done} of {self.nbytes}")
            done += count

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of a small range."""
        target = np.empty(nbytes, np.uint8)
        self.read_into(target, offset)
        return target.tobytes()

    def _map(self, flags: int) -> mmap.mmap:
        return mmap.mmap(self.fd, self.nbytes, flags=flags)

    def _view(self, mapping: mmap.mmap) -> _Bytes:
        # Made directly on the mapping: NumPy skips a subclass that is a view of an ndarray when it
        # looks for the base of a view, and the memory would be freed under it.
        view = _Bytes(self.nbytes, np.uint8, memoryview(mapping))
        view.memory = self
        return view

    def _write(self, payload: bytes | memoryview | np.ndarray, offset: int) -> None:
        if len(payload) >= CHECKED_BYTES and self._mapping is None:
            _check_available(len(payload))
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        if self._mapping is not None:
            target = np.frombuffer(self._mapping, np.uint8, len(view), offset)
            np.copyto(target, np.frombuffer(view, np.uint8))
            return
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done:], offset + done)
            except OSError as error:
                raise MemoryError(f"cannot write {len(view)} bytes to memory: {error}") from error


class Views:
    """Lends writable views of the arrays of one memory, each as if it were a fresh copy.

    Views are copy-on-write. One mapping serves all arrays once; an array asked for again while its
    first view may still be in use gets another mapping, where its bytes are untouched. Ranges lent
    by one object must not overlap, except equal ones.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._lock = threading.Lock()
        self._mappings: list[_Lent] = []

    def lend(self, offset: int, nbytes: int) -> np.ndarray | None:
        """Return the bytes of a mapping in which this range is untouched; None if none can be had."""
        with self._lock:
            self._mappings = [lent for lent in self._mappings if lent.view() is not None]
            for lent in self._mappings:
                view = lent.view()
                if view is not None and offset not in lent.offsets and offset + nbytes <= lent.filled_bytes:
                    lent.offsets.add(offset)
                    return view
            if len(self._mappings) >= MAX_MAPPINGS:
                return None
            filled_bytes = self.memory.used
            try:
                view = self.memory.private()
            except OSError:  # too many open files or mappings: a copy needs neither
                return None
            self._mappings.append(_Lent(view, filled_bytes, offset))
            return view


class _Lent:
    """A mapping, as long as somebody uses it, and the offsets of the arrays lent from it."""

    def __init__(self, view: np.ndarray, filled_bytes: int, offset: int) -> None:
        self.view = weakref.ref(view)
        # What is appended later may be missing in pages that were copied on write before.
        self.filled_bytes = filled_bytes
        self.offsets = {offset}


class Arena:
    """Puts arrays one behind the other into memory from `allocate(nbytes) -> Memory`.

    `allocate` gives memory of at least `nbytes` bytes that nobody else uses; it is overwritten.
    The default makes sparse files, so asking for too much costs nothing.
    """

    def __init__(self, allocate: Callable[[int], Memory] | None = None) -> None:
        self._allocate = allocate or _sparse
        self._lock = threading.Lock()
        self._views: Views | None = None
        self._expected_bytes = 0  # each record from now on
        self._next_bytes = 0  # the next one

    def expect(self, nbytes: int) -> None:
        """Say how large the next records are, so that each gets one memory."""
        with self._lock:
            self._expected_bytes = nbytes
        self.make_room(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Let the next `nbytes` bytes stand in one memory."""
        with self._lock:
            self._next_bytes = nbytes
            views = self._views
            if views is not None and views.memory.nbytes - views.memory.used < nbytes:
                self._views = None

    def store(self, payload: np.ndarray) -> tuple[Views, int]:
        """Copy `payload` (uint8) and return where it stands. Raises MemoryError."""
        with self._lock:
            views = self._views
            offset = views.memory.append(payload) if views is not None else None
            if views is None or offset is None:
                views = self._begin(len(payload))
                offset = views.memory.append(payload)
            assert offset is not None, "_begin made room"
            return views, offset

    def holds(self, memory: Memory) -> bool:
        """Whether the next array may be put into `memory`."""
        views = self._views
        return views is not None and views.memory is memory

    def end_record(self, memory: Memory, end: int) -> None:
        """Say that the record that ends at byte `end` of `memory` is complete.

        If nothing was put behind it yet, the next array begins a record: elsewhere, unless small.
        """
        with self._lock:
            if not self.holds(memory) or memory.used != end:
                return
            if end >= OWN_MEMORY_BYTES:
                self._views = None
            else:
                memory.align()

    def _begin(self, nbytes: int) -> Views:
        self._views = None  # free the old one first
        wanted = max(nbytes, self._expected_bytes, self._next_bytes) + HEADROOM_BYTES
        self._next_bytes = 0
        # A size that is known needs no room for growth: it may be memory with all its pages.
        least = 0 if self._expected_bytes else CHUNK_BYTES
        self._views = Views(empty_memory(self._allocate, max(wanted, least)))
        return self._views


class Workspace:
    """Gives out pieces of memory from `allocate(nbytes) -> Memory`, each once, to work in.

    Memory that was touched before costs a tenth of fresh memory; whoever allocates knows where
    some is. `nbytes` is what will be needed in all; what is needed beyond it is not given.
    """

    def __init__(self, allocate: Callable[[int], Memory], nbytes: int) -> None:
        self._allocate = allocate
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._bytes: np.ndarray | None = None
        self._used = 0

    def take(self, nbytes: int) -> np.ndarray | None:
        """A piece of `nbytes` bytes, aligned, with any content; None if there is none left."""
        with self._lock:
            begin = -(-self._used // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
            if begin + nbytes > self._nbytes:
                return None
            if self._bytes is None:
                try:
                    self._bytes = empty_memory(self._allocate, self._nbytes).shared()
                except MemoryError:
                    self._nbytes = 0
                    return None
            self._used = begin + nbytes
            return self._bytes[begin : self._used]


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 1 GiB a piece, for its next arrays.

    A strategy makes arrays as large as layers, again and again. The allocator of glibc maps fresh
    memory for each and gives it back, and first touching it costs more than the arithmetic.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # The numbers are those of malloc.h; where they are refused, nothing changes.
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def empty_memory(allocate: Callable[[int], Memory], nbytes: int) -> Memory:
    """Ask `allocate` for memory to overwrite. Raises MemoryError if it gives too little."""
    memory = allocate(nbytes)
    if memory.nbytes < nbytes:
        raise MemoryError(f"asked for memory of {nbytes} bytes and got {memory.nbytes}")
    memory.used = 0
    return memory


def _sparse(nbytes: int) -> Memory:
    return Memory.create(nbytes, sparse=True)


def _close(fd: int, pid: int, on_close: Callable[[int], Any] | None) -> None:
    if on_close is None or pid != os.getpid():  # a forked child has only a copy of the descriptor
        os.close(fd)
    else:
        on_close(fd)


def _check_available(nbytes: int) -> None:
    available = _available_bytes()
    if available is not None and nbytes > available:
        raise MemoryError(
            f"{nbytes} bytes of memory are needed and {available} are available on this machine: "
            "end other processes, or use a smaller model"
        )


def _available_bytes() -> int | None:
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
