"""One learner and one follower on either side of a link, for `anabranch bench link`: versions out, versions offered.

Invariant: what is timed ends when the follower offers a version whose digest it has checked. Own encoding and own decoding
are parts of that same time, taken where they happen: until the last chunk is encoded, and from the last chunk's arrival on.
Held by tests/process/test_bench_link.py.

The learner alternates between two states, so that every update is as large as the first. Its anchor stays here: the
follower's mirror is filled with it directly, since hundreds of megabytes over the link would say nothing about updates.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, cast

from anabranch.deploy.slow_link import SlowLink
from anabranch.kernels.delta_codec import CODEC, Encoded, encode_anchor, encode_delta
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.digest import tensor_digest
from anabranch.kernels.workers import Workers
from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.producers.node_mirror import NodeMirror
from anabranch.producers.weight_follower import WeightFollower
from anabranch.schemas.errors import DeadlineError
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.weight_channel import WeightChannel

State = dict[str, Bits]
RUN = "bench"
OFFER_DEADLINE_S = 60.0
_PUT_THREADS = 4


@dataclass(frozen=True)
class Model:
    """Two states to go to and fro between, with what goes with them."""

    name: str
    layout: Layout
    states: tuple[State, State]
    digests: tuple[str, str]
    anchor: tuple[bytes, ...]  # of states[0]

    @classmethod
    def of(cls, name: str, layout: Layout, states: tuple[State, State], workers: Workers) -> Model:
        digests = [root_digest(layout, {n: tensor_digest(bits) for n, bits in state.items()}) for state in states]
        anchor = encode_anchor(layout, states[0], workers).chunks
        return cls(name, layout, states, (digests[0], digests[1]), anchor)


@dataclass(frozen=True, slots=True)
class Timed:
    """Of one update: bytes of its chunks; seconds from the beginning of publishing to the offer, of encoding, and from the
    last chunk's arrival to the offer (decoding, verifying, writing)."""

    payload_bytes: int
    chunks: int
    total_s: float
    encode_s: float
    decode_s: float

    @property
    def link_s(self) -> float:
        """What is left for the link, the servers and waiting."""
        return self.total_s - self.encode_s - self.decode_s


class Learner:
    """On side a. Publishes as a learner does: encode, store chunks, commit."""

    def __init__(self, channel: WeightChannel, model: Model, workers: Workers) -> None:
        self._channel, self._model, self._workers = channel, model, workers
        self._pool = ThreadPoolExecutor(_PUT_THREADS, thread_name_prefix="put")
        channel.put_layout(model.layout)
        self.epoch, self.version = channel.open_epoch(), 0
        self.first = self._manifest("anchor", None, ())
        channel.commit(self.first)

    def publish(self) -> tuple[Encoded, float, float]:
        """The next version. Returns what was encoded, when it began and how long encoding took."""
        began = time.monotonic()
        old, new = self.version % 2, (self.version + 1) % 2
        encoded = encode_delta(self._model.layout, self._model.states[old], self._model.states[new], self._workers)
        encode_s = time.monotonic() - began
        digests = list(self._pool.map(self._channel.blobs.put, encoded.chunks))
        base = Base(epoch=self.epoch, version=self.version, digest=self._model.digests[old])
        self.version += 1
        chunks = [Chunk(digest=d, size_bytes=len(c)) for d, c in zip(digests, encoded.chunks, strict=True)]
        self._channel.commit(self._manifest("delta", base, tuple(chunks), encoded.changed_elements))
        return encoded, began, encode_s

    def _manifest(
        self, kind: Literal["anchor", "delta"], base: Base | None, chunks: tuple[Chunk, ...], changed: int = 0
    ) -> Manifest:
        return Manifest(
            kind=kind, run=RUN, epoch=self.epoch, version=self.version, base=base,
            result_digest=self._model.digests[self.version % 2], layout_hash=self._model.layout.hash, codec=CODEC,
            chunks=chunks, full_bytes=self._model.layout.payload_bytes, changed_elements=changed,
            total_elements=sum(t.numel for t in self._model.layout.tensors), learner_step=self.version,
            fork_version=0, published_ms=time.time_ns() // 10**6,
        )  # fmt: skip

    def close(self) -> None:
        self._pool.shutdown()
        self._channel.close()


class WatchedBlobs:
    """The blob store of a follower's channel, which notes when a chunk has arrived."""

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner
        self.arrived = 0.0

    def get(self, digest: str, size_bytes: int) -> bytes:
        payload = self._inner.get(digest, size_bytes)
        self.arrived = time.monotonic()
        return payload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedChannel:
    """The channel that a follower reads from, with `WatchedBlobs`."""

    def __init__(self, inner: WeightChannel) -> None:
        self._inner = inner
        self.blobs = WatchedBlobs(inner.blobs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Region:
    """On side b: a follower, and a thread in the engine's place, which takes every offer at once."""

    def __init__(
        self,
        channel: WeightChannel,
        hub: WeightChannel,
        model: Model,
        first: Manifest,
        *,
        poll_ms: int,
        threads: int,
        fetch_threads: int,
    ) -> None:
        """`channel` is read from; leases go to `hub`. To be called on side b, like `close`."""
        self._channel, self._hub = WatchedChannel(channel), hub
        self._leases = LeaseKeeper(hub, "bench", lease_ms=120_000)
        self._leases.start()
        self._follower = WeightFollower(
            cast(WeightChannel, self._channel),
            seeded(model, first, threads),
            run=RUN,
            poll_ms=poll_ms,
            fetch_threads=fetch_threads,
            leases=self._leases,
        )
        self._offers: dict[PolicyVersion, tuple[float, float]] = {}
        self._news = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._take_offers, name="engine", daemon=True)
        self._thread.start()
        self._follower.start()

    def _take_offers(self) -> None:
        while not self._stop:
            if self._follower.staged(wait_s=0.2) is not None and (held := self._follower.hold()) is not None:
                now = time.monotonic()
                self._follower.confirm(held)
                with self._news:
                    self._offers[held.policy] = self._channel.blobs.arrived, now
                    self._news.notify_all()

    def offered(self, policy: PolicyVersion) -> tuple[float, float]:
        """When the last chunk of `policy` had arrived, and when it was offered (time.monotonic). Raises DeadlineError."""
        with self._news:
            if not self._news.wait_for(lambda: policy in self._offers, OFFER_DEADLINE_S):
                raise DeadlineError.waiting_for(
                    f"weights {policy} to reach the region", OFFER_DEADLINE_S, self._follower.last_error
                )
            return self._offers[policy]

    def close(self) -> None:
        self._stop = True
        self._thread.join(5)
        self._follower.close()
        self._leases.close()
        self._channel.close()
        self._hub.close()


def seeded(model: Model, first: Manifest, threads: int) -> NodeMirror:
    """A mirror of its own that holds the learner's first version."""
    mirror = NodeMirror(model.layout, MirrorMemory.make(model.layout, RUN), codec_threads=threads, alone="a benchmark")
    if not mirror.try_turn():
        raise AssertionError("a mirror nobody knows has the turn taken")
    mirror.rebuild(first, model.anchor, path=("anchor",), path_bytes=0)
    mirror.end_turn()
    return mirror


@contextlib.contextmanager
def sites(link: SlowLink, learner: Learner, region: Region) -> Iterator[None]:
    try:
        yield
    finally:
        with link.inside("b"):
            region.close()
        with link.inside("a"):
            learner.close()


def time_updates(learner: Learner, region: Region, *, updates: int, pause_s: float) -> Iterator[Timed]:
    """`updates` versions, `pause_s` apart, after one that is not counted (it opens connections and compiles). To be called
    on side a."""
    for number in range(updates + 1):
        time.sleep(pause_s)
        encoded, began, encode_s = learner.publish()
        arrived, offered = region.offered(PolicyVersion(learner.epoch, learner.version))
        if number:
            payload = sum(map(len, encoded.chunks))
            yield Timed(payload, len(encoded.chunks), offered - began, encode_s, offered - arrived)
