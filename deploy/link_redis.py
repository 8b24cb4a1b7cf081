"""Redis servers with the configuration of deploy/redis on either side of a slow link.

Invariant: a server runs with the shipped file and the words given here after it, in a namespace that nothing outside can
reach, and ends with the link. Held by tests/e2e/test_region_replica.py.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import redis

from anabranch.deploy.slow_link import ADDRESS, Side, SlowLink
from anabranch.schemas.errors import AnabranchError, DeadlineError, StreamUnavailableError
from anabranch.transport.embedded_valkey import server_binary
from anabranch.transport.redis_client import connect

Role = Literal["hub", "replica", "region"]
CONFIGURATIONS = Path(__file__).resolve().with_name("redis")
PORT: dict[Role, int] = {"hub": 6379, "replica": 6390, "region": 6380}
_START_S = 20.0
REPLICA_OF_HUB = ("--replicaof", f"{ADDRESS['a']} {PORT['hub']}")


@dataclass(frozen=True)
class LinkRedis:
    """A running server. `url` holds for both sides of the link."""

    link: SlowLink
    side: Side
    role: Role
    url: str
    process: subprocess.Popen[Any]

    def client(self, side: Side | None = None, *, url: str | None = None) -> redis.Redis:
        """A client that has connected from `side` (default: the server's own). It reconnects from whichever side its
        thread is on then."""
        with self.link.inside(side or self.side):
            return connect(url or self.url, deadline_s=_START_S, what=f"the {self.role}'s Redis")


def start_redis(
    link: SlowLink, side: Side, role: Role, directory: Path, words: Sequence[str] = (), *, login: str = ""
) -> LinkRedis:
    """Start `role`'s server on `side`, over `directory`; returns once it answers. `words`: directives that follow the
    file. `login`: "user:password@" if it wants one.

    Raises:
        AnabranchError: it ends by itself; with the end of its log.
        DeadlineError: it does not answer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    binding = ["--bind", f"127.0.0.1 {ADDRESS[side]}", "--supervised", "no", "--shutdown-timeout", "0"]
    if not login:
        binding += ["--protected-mode", "no"]  # nobody outside the namespaces can reach it
    command = [str(server_binary()), str(CONFIGURATIONS / f"{role}.conf"), *binding]
    process = link.run(
        side, [*command, "--dir", str(directory), "--logfile", str(log), *words], stdout=subprocess.DEVNULL
    )
    url = f"redis://{login}{ADDRESS[side]}:{PORT[role]}/0"
    end = time.monotonic() + _START_S
    with link.inside(side):
        while True:
            with contextlib.suppress(StreamUnavailableError):
                connect(url, deadline_s=0.2, what=f"the {role}'s Redis").close()
                return LinkRedis(link, side, role, url, process)
            if process.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.05)
    said = " | ".join(log.read_text(errors="replace").strip().splitlines()[-4:]) if log.exists() else "it left no log"
    if process.poll() is not None:
        raise AnabranchError(f"the {role}'s Redis ended at start: {said}")
    raise DeadlineError.waiting_for(f"the {role}'s Redis to answer", _START_S, said)


def wait_for_replica(replica: redis.Redis, deadline_s: float = 30.0) -> dict[str, Any]:
    """Wait until the replica is connected to its hub and has loaded what it sent; returns INFO replication.

    Call it on the replica's side. Raises DeadlineError.
    """
    end = time.monotonic() + deadline_s
    info: dict[str, Any] = {}
    while time.monotonic() < end:
        with contextlib.suppress(redis.exceptions.ConnectionError):  # refused while it loads
            info = replica.info("replication")
            if info["master_link_status"] == "up":
                return info
        time.sleep(0.02)
    raise DeadlineError.waiting_for("the replica to have the hub's data", deadline_s, str(info))
