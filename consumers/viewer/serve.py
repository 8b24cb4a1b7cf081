"""Serves the viewer until a signal comes.

Invariant: its port is bound before its address is told; it listens where it was told and nowhere else. Held by
tests/process/test_view_command.py.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from anabranch.consumers.viewer.app import Viewed, make_app
from anabranch.consumers.viewer.guard import LOOPBACK_NAMES, PARAMETER
from anabranch.schemas.errors import TemporaryError

MOST_AT_ONCE = 64
GRACE_S = 5


def serve(viewed: Viewed, *, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Args:
        host: 127.0.0.1, ::1 or localhost need no token; any other address gets one, in the address that is told.
        port: 0: a free one.
        ready: told the address to open.

    Raises TemporaryError: the address cannot be listened on.
    """
    loopback = host in LOOPBACK_NAMES
    token = None if loopback else secrets.token_urlsafe(24)
    app = make_app(viewed, hosts=LOOPBACK_NAMES if loopback else None, token=token)
    listening = _listen(host, port)
    try:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/" + (f"?{PARAMETER}={token}" if token else ""))
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, limit_concurrency=MOST_AT_ONCE,
            timeout_graceful_shutdown=GRACE_S, lifespan="off", log_config=None,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError as error:
        raise TemporaryError(
            f"the viewer cannot listen on {host} port {port}: {error}; choose another --port"
        ) from error
    return made
