"""A TCP proxy in front of fedlane's data port: it counts bytes, slows uploads down, and can be cut.

    with Proxy(upload_bytes_per_s=10e6) as proxy:
        flower.run(app, proxy.run_config, timeout_s=60)
"""

import socket
import threading
import time

from harness import free_ports

BLOCK_BYTES = 64 << 10


class Proxy:
    """downloaded, uploaded: bytes that went to the clients, and from them."""

    def __init__(self, upload_bytes_per_s: float = 0.0) -> None:
        self.downloaded = 0
        self.uploaded = 0
        self._rate = upload_bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._target = free_ports(1)[0]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._sockets: list[socket.socket] = []

    @property
    def run_config(self) -> dict[str, object]:
        """What leads the clients of a run here."""
        return {"fedlane.port": self._target, "fedlane.advertise": f"127.0.0.1:{self._listener.getsockname()[1]}"}

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Ends every connection, and refuses new ones."""
        # Only this wakes the thread that accepts.
        _shut(self._listener)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), 10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, self._count_up), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, self._count_down), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, count) -> None:
        try:
            while block := source.recv(BLOCK_BYTES):
                count(len(block))
                target.sendall(block)
        except OSError:
            pass
        _shut(target)
        _shut(source)

    def _count_down(self, nbytes: int) -> None:
        with self._lock:
            self.downloaded += nbytes

    def _count_up(self, nbytes: int) -> None:
        with self._lock:
            self.uploaded += nbytes
            if not self._rate:
                return
            self._free_at = max(time.monotonic(), self._free_at) + nbytes / self._rate
            pause_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause_s))


class BlackHole:
    """A port that neither takes a connection nor refuses it."""

    def __enter__(self) -> "BlackHole":
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        # Its queue is full, and nobody accepts.
        self._filling = [self._knock() for _ in range(4)]
        return self

    def _knock(self) -> socket.socket:
        knocking = socket.socket()
        knocking.setblocking(False)
        knocking.connect_ex(self._listener.getsockname())
        return knocking

    def __exit__(self, *_: object) -> None:
        for each in (*self._filling, self._listener):
            each.close()


def _shut(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
