"""A TCP link to a server that can lose a reply: the request arrives, the answer never does."""

from __future__ import annotations

import contextlib
import socket
import threading


class FlakyLink:
    """Forwards connections to `port`; after `lose_replies(marker)` the connection that carries a request containing
    `marker` is cut once the server has answered, `times` times."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._marker, self._times = b"", 0
        self.lost = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def lose_replies(self, marker: bytes, times: int = 1) -> None:
        with self._lock:
            self._marker, self._times = marker, times

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                cut = threading.Event()
                for one, other, requests in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pump, args=(one, other, requests, cut), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, requests: bool, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if requests:
                    with self._lock:
                        if self._times and not cut.is_set() and self._marker in data:  # a request may come in pieces
                            self._times -= 1
                            cut.set()
                elif cut.is_set():
                    self.lost += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone does not wake a thread inside accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()
