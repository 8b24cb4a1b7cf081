"""deploy/redis/*.conf: a server takes every line of them, and does what their comments say."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from anabranch.deploy.link_redis import CONFIGURATIONS, PORT
from anabranch.transport.embedded_valkey import server_binary
from anabranch.transport.redis_client import connect
from anabranch.transport.runtime import bound_to_parent

pytestmark = pytest.mark.process
ROLES = ("hub", "replica", "region")
UNITS = {"kb": 2**10, "mb": 2**20, "gb": 2**30}
Start = Callable[..., tuple[subprocess.Popen[bytes], redis.Redis]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(role, port, *words)`: a server over a folder of the role's own, and a client of it."""
    running: list[subprocess.Popen[bytes]] = []
    clients: list[redis.Redis] = []

    def run(role: str, port: int, *words: str) -> tuple[subprocess.Popen[bytes], redis.Redis]:
        folder = tmp_path / role
        folder.mkdir(exist_ok=True)
        own = ["--dir", str(folder), "--port", str(port), "--logfile", str(folder / "log"), "--shutdown-timeout", "0"]
        process = subprocess.Popen(
            bound_to_parent([str(server_binary()), str(CONFIGURATIONS / f"{role}.conf"), *own, *words])
        )
        running.append(process)
        clients.append(connect(f"redis://127.0.0.1:{port}/0", deadline_s=15, what=f"the {role}"))
        return process, clients[-1]

    yield run
    for client in clients:
        client.close()
    for process in reversed(running):
        process.terminate()
        process.wait(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def directives(role: str) -> dict[str, str]:
    lines = (CONFIGURATIONS / f"{role}.conf").read_text().splitlines()
    pairs = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    found = {name: value for name, value in pairs}
    assert len(found) == len(pairs), "a directive stands twice"
    return found


def plain(value: str) -> str:
    """As CONFIG GET shows it: bytes without a unit, no quotes."""
    sizes = re.sub(r"\b(\d+)(kb|mb|gb)\b", lambda m: str(int(m[1]) * UNITS[m[2]]), value)
    return sizes.strip('"')


@pytest.mark.parametrize("role", ROLES)
def test_a_server_takes_every_line(role: str, start: Start) -> None:
    wanted = directives(role)
    assert wanted.pop("bind") == "127.0.0.1"
    assert wanted.pop("port") == str(PORT[role])  # type: ignore[index]
    del wanted["supervised"]  # a word for the start; "no" where nobody supervises
    _, client = start(role, free_port())
    limits = wanted.pop("client-output-buffer-limit", None)
    if limits is not None:
        kind, *rest = plain(limits).split()
        shown = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"].split()
        at = next(i for i, word in enumerate(shown) if word in ("slave", kind))
        assert shown[at + 1 : at + 4] == rest
    for name, value in wanted.items():
        assert client.config_get(name)[name] == plain(value), name
    assert wanted["maxmemory-policy"] == "noeviction"


def replicated(hub: redis.Redis, replica: redis.Redis) -> None:
    """Wait until what the hub has now is on the replica."""
    stamp = str(time.monotonic_ns())
    hub.set("stamp", stamp)
    end = time.monotonic() + 20
    while True:
        try:
            if replica.get("stamp") == stamp.encode():
                return
        except redis.exceptions.ConnectionError:
            pass  # loading
        assert time.monotonic() < end, replica.info("replication")
        time.sleep(0.02)


def full_copies(hub: redis.Redis) -> int:
    return int(hub.info("stats")["sync_full"])


def test_a_replica_that_restarts_goes_on_from_where_it_was(start: Start) -> None:
    port = free_port()
    _, hub = start("hub", port)
    words = (free_port(), "--replicaof", f"127.0.0.1 {port}")
    process, replica = start("replica", *words)
    replicated(hub, replica)
    assert full_copies(hub) == 1
    process.terminate()
    process.wait(10)
    hub.set("meanwhile", "1")
    _, replica = start("replica", *words)
    replicated(hub, replica)
    assert replica.get("meanwhile") == b"1"
    assert full_copies(hub) == 1
    with pytest.raises(redis.exceptions.ReadOnlyError):
        replica.set("a", "b")


def test_a_hub_that_restarts_has_lost_nothing_and_sends_a_full_copy(start: Start) -> None:
    port = free_port()
    process, hub = start("hub", port)
    _, replica = start("replica", free_port(), "--replicaof", f"127.0.0.1 {port}")
    hub.set("weights", "1")
    replicated(hub, replica)
    process.terminate()
    process.wait(10)
    assert replica.get("weights") == b"1"  # served meanwhile
    _, hub = start("hub", port)
    assert hub.get("weights") == b"1"
    replicated(hub, replica)
    assert full_copies(hub) == 1
