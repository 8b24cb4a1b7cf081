"""The listening end of sd_notify for supervised children, so that one that hangs is noticed as under systemd.

Invariant: one datagram socket per child in the abstract namespace (no file to leave behind), never inherited, read
without blocking; until a child's first message nothing is expected of it. Held by tests/process/test_supervisor.py.
"""

from __future__ import annotations

import contextlib
import socket
import time


class NotifySocket:
    """`silent_s` is the time since the child's last message in this start, None before its first."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + name)
        self.address = "@" + name  # as $NOTIFY_SOCKET wants it
        self._heard: float | None = None

    def restarted(self) -> None:
        """Forget what the child's former process said."""
        self.receive()
        self._heard = None

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(4096):
                self._heard = time.monotonic()

    @property
    def silent_s(self) -> float | None:
        return None if self._heard is None else time.monotonic() - self._heard

    def close(self) -> None:
        self._socket.close()
