"""Weights reach a region over a slow link in the right order, once per region, through a replica or an object store.

The servers run with deploy/redis/*.conf, users and passwords included, 150 ms and 100 Mbit apart.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from anabranch.deploy.link_redis import CONFIGURATIONS, REPLICA_OF_HUB, LinkRedis, start_redis, wait_for_replica
from anabranch.deploy.slow_link import ADDRESS, SIDES, Side, SlowLink
from anabranch.schemas.errors import AnabranchError, DeltaError, ManifestError, StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.links import slow_link

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]
SITE = Path(__file__).with_name("region_site.py")
ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUT = Layout.build([("w", "bf16", (64,))])
KEEP = 25  # versions behind the head that retention leaves
CHUNKS = 8
BACKLOG_BYTES = 2**20
S3_PORT = 5000
UPDATES = 6
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


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("two sites")
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
        assert made.replication()["role"] == "slave"
        yield made


# --- order


class Learner:
    """Commits versions of random chunks, and drops those more than KEEP behind the head."""

    def __init__(self, channel: RedisWeightChannel, run: str) -> None:
        self.channel, self.run = channel, run
        self.epoch, self.version = channel.open_epoch(), 0
        channel.put_layout(LAYOUT)
        self._commit("anchor", None, 1_000)

    def step(self, chunk_bytes: int) -> None:
        base = Base(epoch=self.epoch, version=self.version, digest=f"{self.version:032x}")
        self.version += 1
        self._commit("delta", base, chunk_bytes)
        old = [e for e in self.channel.index() if e.policy.version < self.version - KEEP]
        self.channel.drop(old)

    def _commit(self, kind: Any, base: Base | None, chunk_bytes: int) -> None:
        payloads = [os.urandom(chunk_bytes) for _ in range(CHUNKS)]
        self.channel.commit(
            Manifest(
                kind=kind, run=self.run, epoch=self.epoch, version=self.version, base=base,
                result_digest=f"{self.version:032x}", layout_hash=LAYOUT.hash, codec="none/1",
                chunks=tuple(Chunk(digest=self.channel.blobs.put(p), size_bytes=len(p)) for p in payloads),
                full_bytes=128, changed_elements=1, total_elements=64, learner_step=self.version, fork_version=0,
                published_ms=0,
            )
        )  # fmt: skip


class Poller:
    """Reads head, index, manifest and every chunk from the replica, without a pause, on a thread in the region."""

    def __init__(self, sites: Sites, run: str) -> None:
        self.channel = sites.channel("b", run)
        self.missing: list[str] = []
        self.heads: list[PolicyVersion] = []
        self.refusals = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        with sites.link.inside("b"):  # a thread stays where it was started
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except StreamUnavailableError:
                self.refusals += 1  # a clear refusal, such as -LOADING
            except AnabranchError as error:
                self.missing.append(repr(error))

    def look(self) -> None:
        head = self.channel.head()
        if head is None:
            if self.heads:
                self.missing.append("the head is gone")
            return
        if not self.heads or self.heads[-1] != head:
            self.heads.append(head)
        try:
            entries = [e for e in self.channel.index() if e.policy == head]
            (manifest,) = self.channel.manifests([(head, entries[0].label if entries else "delta")])
            if not entries or manifest is None:
                raise ManifestError(f"head {head}: index {entries}, manifest {manifest}")
            for chunk in manifest.chunks:
                self.channel.blobs.get(chunk.digest, chunk.size_bytes)
        except (ManifestError, DeltaError) as error:
            now = self.channel.head()
            if now is None or now.version - head.version < KEEP:  # else retention took what was read so slowly
                self.missing.append(str(error))

    def reach(self, version: int, deadline_s: float = 30.0) -> None:
        end = time.monotonic() + deadline_s
        while not (self.heads and self.heads[-1].version == version):
            assert time.monotonic() < end, f"the region is at {self.heads[-1:]}, not at version {version}"
            time.sleep(0.01)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(15)
        assert not self._thread.is_alive()
        self.channel.close()


def test_a_head_never_arrives_before_its_payload(sites: Sites) -> None:
    with sites.link.inside("a"):
        learner = Learner(sites.channel("a", "order"), "order")
        poller = Poller(sites, "order")
        for _ in range(2 * KEEP):
            learner.step(4_000)
        poller.reach(learner.version)
        assert len(poller.heads) > 5
        assert poller.refusals == 0
        full, partial = sites.copies()

        # The link is cut for a while: the region serves what it has, then goes on from where it was.
        sites.link.cut()
        before = learner.version
        for _ in range(5):
            learner.step(4_000)
        _drop_replicas(sites)
        poller.reach(before)
        sites.link.mend()
        poller.reach(learner.version)
        sites.wait_for_copies(full, partial + 1)

        # It is cut for so long that the hub's backlog runs over: a full copy.
        sites.link.cut()
        for _ in range(KEEP):
            learner.step(2 * BACKLOG_BYTES // (KEEP * CHUNKS))
        _drop_replicas(sites)
        sites.link.mend()
        for _ in range(10):
            learner.step(4_000)
            time.sleep(0.1)
        poller.reach(learner.version)
        sites.wait_for_copies(full + 1, partial + 1)
        poller.end()
    assert poller.missing == []
    versions = [head.version for head in poller.heads]
    assert versions == sorted(versions)


def _drop_replicas(sites: Sites) -> None:
    """The hub gives up on its replicas at once, as it would after repl-timeout."""
    admin = sites.hub.client(url=sites.hub.url.replace(login("learner"), login("operator")))
    admin.client_kill_filter(_type="replica")
    admin.close()


def test_a_head_without_its_payload_would_be_seen(sites: Sites) -> None:
    """What the test above leans on: chunks that are not there are noticed, from the region."""
    with sites.link.inside("a"):
        learner = Learner(sites.channel("a", "hole"), "hole")
        learner.step(1_000)
        poller = Poller(sites, "hole")
        poller.reach(1)
        assert poller.missing == []
        (manifest,) = learner.channel.manifests([(PolicyVersion(learner.epoch, 1), "delta")])
        assert manifest is not None
        learner.channel.blobs.delete([manifest.chunks[-1].digest])
        end = time.monotonic() + 20
        while not poller.missing and time.monotonic() < end:
            time.sleep(0.01)
        poller.end()
        assert "is not in" in poller.missing[0]


def test_a_replica_takes_no_writes_and_no_commands_of_an_administrator(sites: Sites) -> None:
    with sites.link.inside("b"):
        client = sites.replica.client()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("ab:order:head", "{}")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command("REPLICAOF", "NO", "ONE")
        client.close()


# --- bytes over the link


class Site:
    """region_site.py in a role of its own."""

    def __init__(self, link: SlowLink, side: Side, role: str, config: Path, environ: dict[str, str]) -> None:
        argv = [sys.executable, "-P", str(SITE), role, str(config)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        self.process = link.run(side, argv, stdin=-1, stdout=-1, text=True, env=environ)
        assert self.answer() == {"ready": True}

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self, deadline_s: float = 45.0) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        assert ready, "no answer from a site"
        line = self.process.stdout.readline()
        assert line, f"a site ended with {self.process.wait(10)}"
        return json.loads(line)


def crossed(link: SlowLink) -> int:
    return sum(link.received_bytes(side) for side in SIDES)


def bytes_of_updates(sites: Sites, config: Path, environ: dict[str, str]) -> tuple[dict[int, int], int]:
    """Bytes that crossed the link while 1, then 8 producers of the region took UPDATES versions each; their payload."""
    learner = Site(sites.link, "a", "publisher", config, environ)
    region = Site(sites.link, "b", "producers", config, environ)
    crossing: dict[int, int] = {}
    for count in (1, 8):
        region.ask(f"grow {count}")
        head = learner.ask("step 1")
        region.ask(f"reach {head['epoch']} {head['version']}")  # connected, anchor taken, leases told
        before, payload = crossed(sites.link), 0
        for _ in range(UPDATES):
            head = learner.ask("step 1")
            payload += head["bytes"]
            reached = region.ask(f"reach {head['epoch']} {head['version']}")
            assert len(reached["digests"]) == 1, reached
        crossing[count] = crossed(sites.link) - before
    return crossing, payload


def config_file(sites: Sites, path: Path, run: str, channel: str) -> Path:
    region = f"redis://{ADDRESS['b']}:6380/0"
    path.write_text(
        f'[run]\nname = "{run}"\n[hub]\nurl = "{sites.hub.url}"\n'
        f'[regions.east]\nurl = "{region}"\nweights_url = "{sites.replica.url}"\n'
        f"[producer]\npoll_ms = 20\n[channel]\n{channel}\n"
    )
    return path


def test_an_update_crosses_the_link_once_for_any_number_of_producers(sites: Sites, tmp_path: Path) -> None:
    crossing, payload = bytes_of_updates(sites, config_file(sites, tmp_path / "c.toml", "bytes", ""), {})
    assert abs(crossing[8] / crossing[1] - 1) <= 0.05, crossing
    assert payload < crossing[1] < 1.15 * payload


def test_so_it_does_from_an_object_store_through_the_region_s_cache(sites: Sites, tmp_path: Path) -> None:
    endpoint = f"{ADDRESS['a']}:{S3_PORT}"
    make_bucket(sites.link, endpoint)
    start_redis(sites.link, "b", "region", tmp_path / "region")
    channel = (
        'blobs = "s3://weights/runs"\nregion_cache_bytes = 100_000_000\n'
        f'[channel.blob_options]\nendpoint = "http://{endpoint}"\nregion = "us-east-1"\nallow_http = "true"'
    )
    environ = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    crossing, payload = bytes_of_updates(sites, config_file(sites, tmp_path / "c.toml", "store", channel), environ)
    assert abs(crossing[8] / crossing[1] - 1) <= 0.05, crossing
    assert payload < crossing[1] < 1.15 * payload


def make_bucket(link: SlowLink, endpoint: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            with link.inside("a"):
                connection = http.client.HTTPConnection(endpoint, timeout=5)
                connection.request("PUT", "/weights")
                assert connection.getresponse().status == 200
                connection.close()
                return
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the S3 server does not start"
            time.sleep(0.1)
