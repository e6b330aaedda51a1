"""A line to a server that can be cut: after the request has been carried out, before its answer arrives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["Line"]


class Line:
    """Forwards connections to a port of this machine.

    Attributes:
        port: where to connect to.
        cut: asked of each request's first bytes; if true its answer is thrown away and the connection closed.
        requests: the first line of each request.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.cut: Callable[[bytes], bool] = lambda request: False
        self.requests: list[str] = []
        self._open: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, do: Callable[[], None]) -> None:
        thread = threading.Thread(target=do, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                doomed = threading.Event()
                self._spawn(lambda n=near, f=far, d=doomed: self._forth(n, f, d))
                self._spawn(lambda n=near, f=far, d=doomed: self._back(n, f, d))

    def _forth(self, near: socket.socket, far: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                if data.split(b" ", 1)[0] in (b"PUT", b"POST", b"GET", b"DELETE", b"HEAD"):
                    self.requests.append(data.split(b"\r\n", 1)[0].decode())
                    if self.cut(data):
                        doomed.set()
                far.sendall(data)
        _shut(far)

    def _back(self, near: socket.socket, far: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(65536):
                if doomed.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    break
                near.sendall(data)
        _shut(near)
        _shut(far)

    def drop(self) -> None:
        """End every connection; new ones are served."""
        for one in self._open[1:]:
            _shut(one)

    def close(self) -> None:
        """End every connection and thread."""
        for one in self._open:
            _shut(one)
            one.close()
        for thread in self._threads:
            thread.join(10)

    @classmethod
    @contextlib.contextmanager
    def to(cls, target: int) -> Iterator[Line]:
        """A line that ends with the block."""
        line = cls(target)
        try:
            yield line
        finally:
            line.close()


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
