"""Producers with a real engine, and the publisher they follow, as processes that a test kills: what `tests.zygote` forks.

The zygote has loaded the engine and swapped nothing, so a fork of it is what a producer is after its engine came up: its
weights and KV are copies of its own, and threads, connections and the node's mirror are made after the fork. The folder of
its checkpoint stands in the environment (`MODEL_VARIABLE`).

A producer says in shared memory (`MARKS`) where each of its two threads is, so that the test can kill it there, and
afterwards knows where it died.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.producers import weight_advance
from anabranch.producers.engine import RolloutEngine
from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.mirror import Mirror
from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.producers.node_mirror import NodeMirror, open_node_mirror
from anabranch.producers.swapper import Swapper
from anabranch.producers.weight_advance import Advancer
from anabranch.producers.weight_follower import WeightFollower
from anabranch.producers.worker_updates import WorkerUpdates
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.keys import Keys
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_retention import retain
from tests.process import weight_actors
from tests.process.weight_actors import die_after, say
from tests.weights import Publisher, State, digest_of

RUN = "swap-kills"
MODEL_VARIABLE = "ANABRANCH_TEST_MODEL"
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 3, 8, 24
PRODUCER = ProducerSection(max_model_len=64, max_num_seqs=4, kv_cache_bytes=2**22, poll_ms=3, verify_every_updates=1)
LEASE_MS = 2_000
RETAIN_BYTES = 6 * 2**20
IDLE_S = 0.005

_SWAP = (
    "producers/engine.py",
    "worker_updates.py",
    "weight_transfer.py",
    "staging.py",
    "swapper.py",
    "weight_follower.py",
)
_LETTING_GO = ("weight_follower.py", "node_mirror.py", "mirror_lock.py", "producers/engine.py")
weight_actors.PLACES |= {  # as there: files, and functions in them
    "prepare": (("staging.py", "update_message.py", "worker_updates.py"), ()),
    "write": (("staging.py", "weight_transfer.py", "worker_updates.py"), ("write", "finish_weight_update")),
    "swap": (_SWAP, ("turn", "hold", "swap", "write", "_forget_kv", "_restart_waiting", "confirm", "_let_go")),
    "scatter": (("node_mirror.py",), ("_scatter",)),
    "finish": (_LETTING_GO, ("_forget_kv", "_restart_waiting", "_start", "confirm", "_let_go", "let_go", "unlock")),
}


class Phase(enum.IntEnum):
    """Where a thread is. Of the engine's: up to VERIFY; of the follower's: from IDLE on."""

    STARTING = 0
    SERVING = 1
    PREPARING = 2  # an update is held and worked out, beside the steps
    SWAPPING = 3
    WRITING = 4  # into the live weights
    FINISHING = 5  # KV, requests, account
    VERIFYING = 6
    IDLE = 7
    FETCHING = 8
    DECODING = 9
    APPLYING = 10
    REBUILDING = 11


MARKS = np.dtype([("engine", "u1"), ("follower", "u1"), ("entered", "<u4", len(Phase))])  # one a producer
_MARKED: tuple[tuple[Any, str, str, Phase], ...] = (
    (RolloutEngine, "prepare", "engine", Phase.PREPARING),
    (RolloutEngine, "swap", "engine", Phase.SWAPPING),
    (WorkerUpdates, "write", "engine", Phase.WRITING),
    (RolloutEngine, "_forget_kv", "engine", Phase.FINISHING),
    (RolloutEngine, "_restart_waiting", "engine", Phase.FINISHING),
    (WeightFollower, "confirm", "engine", Phase.FINISHING),
    (Swapper, "verify_now", "engine", Phase.VERIFYING),
    (Advancer, "_follow", "follower", Phase.FETCHING),
    (weight_advance, "decode", "follower", Phase.DECODING),
    (NodeMirror, "_write", "follower", Phase.APPLYING),
    (NodeMirror, "rebuild", "follower", Phase.REBUILDING),
)


def map_marks(path: str | Path) -> Any:
    return np.memmap(path, MARKS, mode="r+")


_engine: RolloutEngine | None = None


def warm_up() -> None:
    """Everything compiled and imported that an actor needs, and an engine."""
    global _engine
    with _stdout_to_stderr():
        weight_actors.warm_up()
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # no thread of its own
        sampling = SamplingSection(temperature=0.7)
        _engine = RolloutEngine(Path(os.environ[MODEL_VARIABLE]), PRODUCER, sampling, seed=0)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all these pages


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Stdout is for the zygote's answers; libraries greet on it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _mark_phases(mark: Any) -> None:
    def marked(owner: Any, name: str, thread: str, phase: Phase) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = mark[thread]
            mark[thread] = phase
            mark["entered"][phase] += 1
            try:
                return original(*args, **kwargs)
            finally:
                mark[thread] = before

        setattr(owner, name, call)

    for place in _MARKED:
        marked(*place)


def produce(
    url: str, node_dir: str, log: str, marks: str, slot: int, kv_policy: str, die: int = 0, where: str = "anywhere"
) -> None:
    """A producer without permits: it follows, swaps and checks as `anabranch produce` does, and samples for nobody."""
    assert _engine is not None
    engine, config = _engine, PRODUCER.model_copy(update={"kv_policy": kv_policy})
    engine._config = config
    mark = map_marks(marks)[slot]
    mark["follower"] = Phase.IDLE
    _mark_phases(mark)
    settle = MirrorMemory.settle

    def settle_and_say(memory: MirrorMemory) -> None:
        settle(memory)
        content = memory.content()
        say(log, event="valid", policy=str(content.policy), digest=content.digest)

    MirrorMemory.settle = settle_and_say  # type: ignore[method-assign]
    fuse = None
    if die:
        die_after(die, where, log)
        fuse = sys.getprofile()
        sys.setprofile(None)  # it slows the steps down: on this thread only in the swapper
    weights, hub = (RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN)) for _ in range(2))
    mirror = open_node_mirror(engine.layout, run=RUN, node_dir=Path(node_dir))
    leases = LeaseKeeper(hub, f"producer-{os.getpid()}", lease_ms=LEASE_MS)
    follower = WeightFollower(weights, mirror, run=RUN, poll_ms=config.poll_ms, fetch_threads=2, leases=leases)
    swapper = Swapper(engine, follower, config)
    say(log, event="started", alone=mirror.alone)
    leases.start()
    follower.start()
    load = Load(engine)
    served: list[PolicyVersion] = []
    while True:
        sys.setprofile(fuse)
        swapper.turn()
        sys.setprofile(None)
        if swapper.swaps > len(served):
            assert engine.policy is not None
            served.append(engine.policy)
            _, verified, live = swapper.verified
            assert verified == str(engine.policy)
            say(log, event="served", policy=verified, live=live, path=follower.serving.path if follower.serving else ())
        mark["engine"] = Phase.PREPARING if swapper.busy else Phase.SERVING
        mark["entered"][mark["engine"]] += 1
        if engine.policy is not None and not swapper.settling:
            load.fill_up()
        if engine.has_unfinished:
            load.step(served)
        elif swapper.blocked:
            time.sleep(IDLE_S)
        else:
            follower.staged(wait_s=IDLE_S)


class Load:
    """Keeps requests running."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._rng, self._names, self._running = engine, random.Random(), itertools.count(), 0

    def fill_up(self) -> None:
        while self._running < REQUESTS:
            prompt = [self._rng.randrange(256) for _ in range(PROMPT_TOKENS)]
            limit = self._rng.randint(1, NEW_TOKENS)
            self._engine.submit(str(next(self._names)), prompt, seed=self._running, max_tokens=limit)
            self._running += 1

    def step(self, served: list[PolicyVersion]) -> None:
        for finished in self._engine.step():
            self._running -= 1
            tags = [span.policy for span in finished.spans]
            assert tags == sorted(set(tags)), f"tags {tags}"
            assert set(tags) <= set(served), f"tags {tags}; served {served[-10:]}"
            assert np.isfinite(finished.logprobs).all()


class ModelPublisher(Publisher):
    """Versions of the engine's checkpoint, of every kind; says the name and digest of each before anybody can see it."""

    def __init__(self, channel: RedisWeightChannel, model_dir: Path, log: str) -> None:
        self._checkpoint, self._log = Mirror.from_checkpoint(model_dir), log
        super().__init__(channel, self._checkpoint.layout, run=RUN, seed=random.randrange(2**31))

    def start(self) -> None:
        self.open(0, {t.name: self._checkpoint.tensor_bits(t.name).copy() for t in self.layout.tensors})

    def next(self) -> None:
        """Mostly a step; now and then a fork at a version before, a new epoch that opens with an anchor, an anchor, a skip."""
        head, chance = self.head, self.rng.random()
        assert head is not None
        if chance < 0.06 and head.version > self.fork_version:
            back = int(self.rng.integers(0, min(4, head.version - self.fork_version) + 1))
            self.fork(PolicyVersion(head.epoch, head.version - back))
        elif chance < 0.08:
            self.open(head.version, self._changed())
        else:
            self._step(self._changed())
            assert self.head is not None
            for steps in (2, 4):
                if self.head.version % steps == 0 and self.head.version - steps >= self.fork_version:
                    self.skip(steps)
            if self.rng.random() < 0.08:
                self.anchor()
        for old in sorted(self.states)[:-24]:
            del self.states[old]
        if self.rng.random() < 0.1:
            retain(self.channel, RETAIN_BYTES)

    def _step(self, state: State) -> None:
        before = self.head
        assert before is not None
        self.head = PolicyVersion(before.epoch, before.version + 1)
        self.states[self.head] = state
        self.merged("delta", before, self.head)

    def _changed(self) -> State:
        """The head's state with 1 to 20 % of each tensor's elements changed to others of its values (finite ones)."""
        density = 10 ** self.rng.uniform(-2.0, -0.7)
        state = {name: bits.copy() for name, bits in self.state.items()}
        for bits in state.values():
            where = np.flatnonzero(self.rng.random(bits.size) < density)
            bits[where] = self.rng.permutation(bits)[: where.size]
        return state

    def _commit(self, kind: Any, policy: PolicyVersion, *args: Any) -> Manifest:
        say(
            self._log,
            event="published",
            kind=kind,
            policy=str(policy),
            digest=digest_of(self.states[policy], self.layout),
        )
        return super()._commit(kind, policy, *args)


def publish(url: str, log: str, most_ms: float) -> None:
    """A version every 0 to `most_ms` milliseconds."""
    channel = RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN))
    publisher = ModelPublisher(channel, Path(os.environ[MODEL_VARIABLE]), log)
    publisher.start()
    while True:
        time.sleep(random.uniform(0, most_ms / 1000))
        publisher.next()
