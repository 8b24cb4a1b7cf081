"""Weights reach a region through a replica of the hub in the right order, also over a cut and a full copy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from anabranch.schemas.errors import AnabranchError, DeltaError, ManifestError, StreamUnavailableError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.e2e.region_sites import BACKLOG_BYTES, Sites, login, two_sites

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]
LAYOUT = Layout.build([("w", "bf16", (64,))])
KEEP = 25  # versions behind the head that retention leaves
CHUNKS = 8


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with two_sites(tmp_path_factory.mktemp("two sites")) as made:
        assert made.replication()["role"] == "slave"
        yield made


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
