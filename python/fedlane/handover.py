"""Requests and memory files between processes of one host, over a Unix socket.

A request is one JSON object; an answer too. Either may come with a file descriptor, so that
memory is handed over and never copied. Sockets have abstract names: they live as long as the
process that listens, in its network namespace, and only the same user is served.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

#: A request or an answer, and the descriptor that came with it or None.
Message = tuple[dict, int | None]


class HandoverError(Exception):
    """The other process refused a request, or is gone; says why."""


class Line:
    """One connection. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, name: str, timeout_s: float) -> "Line":
        """Connects to the process that listens under ``name``; `OSError` if there is none.

        Anybody on the host may take a name, so another user's process is refused.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect("\0" + name)
            connection.settimeout(None)
            line = cls(connection)
            if line.peer_uid() != os.getuid():
                raise PermissionError(f"the process that listens as {name} is another user's")
        except OSError:
            connection.close()
            raise
        return line

    def ask(self, request: dict, fd: int | None = None) -> Message:
        """Sends a request and waits for its answer. The caller closes the descriptor it gets."""
        try:
            self.send(request, fd)
            answer = self.receive()
        except OSError as error:
            raise HandoverError(f"the other process is gone: {error}") from error
        if answer is None:
            raise HandoverError("the other process is gone")
        if "error" in answer[0]:
            raise HandoverError(answer[0]["error"])
        return answer

    def send(self, message: dict, fd: int | None = None) -> None:
        """Sends one message."""
        body = json.dumps(message).encode()
        frame = _LENGTH.pack(len(body)) + body
        sent = socket.send_fds(self._socket, [frame], [] if fd is None else [fd])
        self._socket.sendall(frame[sent:])

    def receive(self) -> Message | None:
        """The next message, or None when the other side has closed."""
        head, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
        fd = fds[0] if fds else None
        try:
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if not head:
                return None
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise HandoverError(f"a message of {length} bytes was announced")
            message = json.loads(self._read(length))
            if not isinstance(message, dict):
                raise HandoverError("a message is not a JSON object")
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        return message, fd

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = self._socket.recv(min(length, 1 << 20))
            if not part:
                raise HandoverError("the other process ended in the middle of a message")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def peer_uid(self) -> int:
        """The user of the other process."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.unpack("3i", credentials)[1]

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


#: Answers the requests of one connection: (request, descriptor) -> (answer, descriptor).
Desk = Callable[[dict, int | None], Message]


class Counter:
    """Listens under ``name`` and serves each connection on a thread of its own.

    ``open_desk()`` makes the desk of a connection, or None when nobody is left to serve it; a desk
    may have a ``close()``, which is called when the connection ends. A desk's errors are answers; it owns the descriptor it was given,
    and the descriptor it returns stays its own.
    """

    def __init__(self, name: str, open_desk: Callable[[], Desk | None]) -> None:
        self._open_desk = open_desk
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind("\0" + name)
        except OSError:
            self._listener.close()
            raise
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="handover", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # No descriptor is left: whoever ends gives some back. Until then they wait.
                time.sleep(0.1)
                continue
            try:
                threading.Thread(target=self._serve, args=(Line(connection),), daemon=True).start()
            except RuntimeError:
                connection.close()  # No thread is left: the other side hears that it is not served.

    def _serve(self, line: Line) -> None:
        desk = self._open_desk()
        try:
            while desk and line.peer_uid() == os.getuid() and (message := line.receive()):
                request, fd = message
                try:
                    answer = desk(request, fd)
                except Exception as error:  # noqa: BLE001: whoever asked must hear of it
                    answer = {"error": f"{error}" or type(error).__name__}, None
                line.send(*answer)
        except (OSError, HandoverError, ValueError):
            pass  # The other side is gone, or speaks another language.
        finally:
            line.close()
            close = getattr(desk, "close", None)
            if close:
                close()

    def close(self) -> None:
        """Stops to listen; open connections go on."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
