"""Two sites for tests, 150 ms and 100 Mbit apart: a hub and an S3 server in one, a replica of the hub in the other.

The servers run with deploy/redis/*.conf, and with the users and passwords that those advise.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from anabranch.deploy.link_redis import CONFIGURATIONS, REPLICA_OF_HUB, LinkRedis, start_redis, wait_for_replica
from anabranch.deploy.slow_link import ADDRESS, Side, SlowLink
from anabranch.schemas.keys import Keys
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.links import slow_link

BACKLOG_BYTES = 2**20
S3_PORT = 5000
PASSWORD = "p w#1"


def user_file(role: str, path: Path) -> Path:
    """The users that the configuration of `role` advises, as the file of a server, and one for the tests themselves."""
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    lines = re.findall(r"^#     (user .*)$", (CONFIGURATIONS / f"{role}.conf").read_text(), re.MULTILINE)
    lines.append("user operator on #HASH ~* +@all")
    path.write_text("\n".join(lines).replace("#HASH", f"#{digest}") + "\n")
    return path


def login(user: str) -> str:
    return f"{user}:{PASSWORD.replace(' ', '%20').replace('#', '%23')}@"


@dataclass
class Sites:
    """Hub on side a; on side b its replica."""

    link: SlowLink
    hub: LinkRedis
    replica: LinkRedis
    watch: redis.Redis = field(init=False)  # the replica's state, as its administrator

    def __post_init__(self) -> None:
        self.watch = self.replica.client(url=self.replica.url.replace(login("producer"), login("operator")))

    def channel(self, side: Side, run: str) -> RedisWeightChannel:
        server = self.hub if side == "a" else self.replica
        return RedisWeightChannel(server.client(side), Keys(run))

    def replication(self) -> dict[str, Any]:
        with self.link.inside("b"):
            return wait_for_replica(self.watch)

    def copies(self) -> tuple[int, int]:
        """Full copies and continuations that the hub has sent its replica, which is connected."""
        self.replication()
        with self.link.inside("a"):
            client = self.hub.client()
            stats = client.info("stats")
            client.close()
        return int(stats["sync_full"]), int(stats["sync_partial_ok"])

    def wait_for_copies(self, full: int, partial: int) -> None:
        end = time.monotonic() + 30
        while (seen := self.copies()) != (full, partial):
            assert time.monotonic() < end, f"{seen} full copies and continuations, not {(full, partial)}"
            time.sleep(0.05)


@contextmanager
def two_sites(folder: Path) -> Iterator[Sites]:
    """Hub, S3 server and replica, running. Skips the test where there can be no slow link."""
    users = {role: user_file(role, folder / f"{role}.acl") for role in ("hub", "replica")}
    replica_login = folder / "replica-login.conf"
    replica_login.write_text(f'masteruser replica\nmasterauth "{PASSWORD}"\n')
    with slow_link(seconds=170) as link:
        s3 = [sys.executable, "-I", "-m", "moto.server", "-H", ADDRESS["a"], "-p", str(S3_PORT)]
        link.run("a", s3, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        hub_words = ["--aclfile", str(users["hub"]), "--repl-backlog-size", str(BACKLOG_BYTES)]
        hub = start_redis(link, "a", "hub", folder / "hub", hub_words, login=login("learner"))
        words = ["--aclfile", str(users["replica"]), "--include", str(replica_login), *REPLICA_OF_HUB]
        replica = start_redis(link, "b", "replica", folder / "replica", words, login=login("producer"))
        made = Sites(link, hub, replica)
        yield made
