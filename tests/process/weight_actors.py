"""Followers and a publisher as processes of their own, for tests that kill them: what `tests.zygote` forks."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import decode, encode_anchor
from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.producers.node_mirror import NodeMirror, open_node_mirror
from anabranch.producers.weight_follower import Staged, WeightFollower
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.weights import Publisher, State, random_state

LAYOUT = Layout.build([("a.weight", "bf16", (512, 800)), ("b.weight", "bf16", (300, 300)), ("c.norm", "f32", (500,))])
RUN = "killed"
DENSITY = 0.02
MIRROR = ("node_mirror.py", "change_log.py", "mirror_memory.py", "mirror_sums.py")
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # files, and functions in them (none: all)
    "anywhere": (("/producers/", "/transport/", "/kernels/", "/schemas/", "tests/weights.py", "weight_actors.py"), ()),
    "decode": (("/kernels/",), ()),
    "fetch": (("fetcher.py", "blob_store.py"), ()),
    "advance": (MIRROR, ("_write", "_scatter", "append", "trim", "settle", "store", "advance", "_empty")),
    "rebuild": ((*MIRROR, "delta_codec.py"), ("rebuild", "decode_anchor", "recomputed", "recover", "clear", "one")),
    "join": (("mirror_registry.py", "mirror_lock.py"), ()),
    "publish": (("redis_weight_channel.py", "tests/weights.py"), ()),
}


def warm_up() -> None:
    """Everything compiled and imported that an actor needs."""
    from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore

    publisher = Publisher(MemoryWeightChannel(MemoryWeightStore(RUN)), LAYOUT, run=RUN)
    publisher.open()
    mirror = NodeMirror(LAYOUT, MirrorMemory.make(LAYOUT, RUN))
    blobs = publisher.channel.blobs
    anchor = publisher.anchor()
    mirror.rebuild(anchor, [blobs.get(c.digest, c.size_bytes) for c in anchor.chunks], path=(), path_bytes=0)
    delta = publisher.step(DENSITY)
    chunks = [blobs.get(c.digest, c.size_bytes) for c in delta.chunks]
    mirror.advance(delta, decode(LAYOUT, chunks, mirror.bits), path=(), path_bytes=0)
    mirror.close()
    assert threading.active_count() == 1


def say(log: str, **what: Any) -> None:
    """One line, in one write, so that lines of several processes do not mix and a killed one leaves none half-written."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, (json.dumps({"pid": os.getpid()} | what) + "\n").encode())
    finally:
        os.close(fd)


def die_after(events: int, where: str, log: str) -> None:
    """SIGKILL at call number `events` (Python or C) that code in `PLACES[where]` makes or is, on any thread: a point in the
    program, not in time."""
    files, functions = PLACES[where]
    left = events
    lock = threading.Lock()

    def is_there(frame: Any) -> bool:
        code = frame.f_code
        return any(f in code.co_filename for f in files) and (not functions or code.co_name in functions)

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal left
        if event not in ("call", "c_call") or not (is_there(frame) or (frame.f_back and is_there(frame.f_back))):
            return
        with lock:
            left -= 1
            if left == 0:
                say(log, event="dies", where=where, function=frame.f_code.co_name)
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


class CountedBlobs:
    """Says what was fetched."""

    def __init__(self, blobs: BlobStore, log: str) -> None:
        self._blobs, self._log = blobs, log

    def get(self, digest: str, size_bytes: int) -> bytes:
        payload = self._blobs.get(digest, size_bytes)
        say(self._log, event="fetched", digest=digest)
        return payload


def follow(url: str, node_dir: str, log: str, die: int = 0, where: str = "anywhere") -> None:
    """A producer without an engine: what it would write into one goes into `served`, by the places it was told, and must be
    the mirror's image then."""
    channel = RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN))
    channel._blobs = CountedBlobs(channel.blobs, log)  # type: ignore[assignment]
    settle = MirrorMemory.settle

    def settle_and_say(memory: MirrorMemory) -> None:
        settle(memory)
        content = memory.content()
        say(log, event="valid", policy=str(content.policy), digest=content.digest)

    MirrorMemory.settle = settle_and_say  # type: ignore[method-assign]
    if die:
        die_after(die, where, log)
    mirror = open_node_mirror(LAYOUT, run=RUN, node_dir=Path(node_dir))
    follower = WeightFollower(channel, mirror, run=RUN, poll_ms=3, fetch_threads=2)
    served = np.zeros_like(mirror.image)
    say(log, event="started", alone=mirror.alone)
    follower.start()
    while True:
        if follower.staged(wait_s=0.5) is None:
            continue
        staged = follower.hold()
        if staged is None:
            time.sleep(0.002)
            continue
        _swap(mirror, staged, served)
        same = bool(np.array_equal(served, mirror.image))
        recomputed = mirror.digest()
        policy, digest = str(staged.policy), staged.digest
        follower.confirm(staged)
        say(log, event="served", policy=policy, digest=digest, recomputed=recomputed, same=same)


def _swap(mirror: NodeMirror, staged: Staged, served: Any) -> None:
    for name, indices in staged.changed.items():
        spec = mirror.layout.by_name[name]
        target = served[spec.offset_bytes : spec.offset_bytes + spec.size_bytes].view(mirror.bits[name].dtype)
        at = slice(None) if indices is None else indices
        target[at] = mirror.bits[name][at]


class DurablePublisher(Publisher):
    """A publisher that can be killed: states go to files first, as a learner's go into its checkpoints."""

    def __init__(self, channel: RedisWeightChannel, folder: Path) -> None:
        super().__init__(channel, LAYOUT, run=RUN, seed=random.randrange(2**31))
        self._folder = folder

    def save(self, policy: PolicyVersion, state: State) -> None:
        path = self._folder / f"{policy}.npz"
        with path.with_suffix(".new").open("wb") as file:
            np.savez(file, **state)
        path.with_suffix(".new").replace(path)

    def load(self, policy: PolicyVersion) -> State | None:
        try:
            with np.load(self._folder / f"{policy}.npz") as stored:
                return {name: stored[name] for name in stored.files}
        except FileNotFoundError:
            return None

    def resume(self) -> None:
        """Open an epoch where the head is, or now and then a few versions before it."""
        head = self.channel.head()
        if head is None:
            version, state = PolicyVersion(self.channel.open_epoch(), 0), random_state(self.rng, LAYOUT)
            self.channel.put_layout(LAYOUT)
            self.head, self.states[version] = version, state
            self.save(version, state)
            self.anchor()
            return
        back = random.choice((0, 0, 1, 3))
        base = PolicyVersion(head.epoch, max(head.version - back, 0))
        on_channel = {entry.policy for entry in self.channel.index()}
        state = self.load(base) if base in on_channel else None
        if state is None:
            base, state = head, self.load(head)
        assert state is not None, f"no file of {base}, which is on the channel"
        self.states[base] = state
        self.head, self.fork_version = PolicyVersion(self.channel.open_epoch(), base.version), base.version
        self.states[self.head] = state
        self.save(self.head, state)  # before anybody can resume from it
        self._commit("fork", self.head, (), base, 0)

    def next(self) -> None:
        assert self.head is not None
        policy = PolicyVersion(self.head.epoch, self.head.version + 1)
        state = {name: bits.copy() for name, bits in self.state.items()}
        for bits in state.values():
            bits[self.rng.random(bits.size) < DENSITY] += 1
        self.save(policy, state)
        before, self.head = self.head, policy
        self.states[policy] = state
        self.merged("delta", before, policy)
        if policy.version % 4 == 0 and policy.version - 4 >= self.fork_version:
            self.skip(4)
        if policy.version % 12 == 0:
            self.anchor()
        for old in [p for p in self.states if p.version < policy.version - 4 or p.epoch != policy.epoch]:
            del self.states[old]
        for file in self._folder.glob("*.npz"):
            if file.stat().st_mtime < time.time() - 30:
                file.unlink(missing_ok=True)


def publish(url: str, folder: str, log: str, every_s: float, die: int = 0, where: str = "anywhere") -> None:
    channel = RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN))
    publisher = DurablePublisher(channel, Path(folder))
    if die:
        die_after(die, where, log)
    publisher.resume()
    say(log, event="publishing", policy=str(publisher.head))
    while True:
        publisher.next()
        time.sleep(every_s)


def anchor_chunks() -> int:
    """How many chunks a snapshot of the model has."""
    state = random_state(np.random.default_rng(0), LAYOUT)
    return len(encode_anchor(LAYOUT, state).chunks)
