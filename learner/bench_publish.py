"""`anabranch bench publish`: what publishing in the background costs the learner's step.

Invariant: steps with publishing and without come in turns of one run, on one engine and the same batches, so that a busy
moment of the machine meets both; a timed step with publishing has the whole background work of the step before beside it
(delta, commit, and the skips that are due), a timed step without has none. Held by
tests/unit/learner/test_bench_publish.py.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.learner.batch import TrainBatch, build_batch
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.publish_order import EpochOpening
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import RunConfig
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.wiring import connect_hub


@dataclass
class _Steps:
    """Timed steps: wall seconds of each, and seconds of processor time in this process beside the training thread."""

    wall_s: list[float] = field(default_factory=list)
    beside_s: float = 0.0
    whole_s: float = 0.0

    @property
    def share_beside(self) -> float:
        return self.beside_s / max(self.whole_s, 1e-9)


class _Bench:
    def __init__(self, config: RunConfig, engine: LearnerEngine, publisher: WeightPublisher) -> None:
        self._engine, self._publisher = engine, publisher
        self._batch = random_batch(config, engine.vocabulary)
        self.version = 0
        self.with_publishing, self.without = _Steps(), _Steps()
        self.blocked_s: list[float] = []
        self.published: list[tuple[float, int, float]] = []  # seconds to commit, bytes, share of elements

    def block(self, steps: int) -> None:
        """`steps` timed steps without publishing, then as many with it."""
        self._publisher.drain()
        with _Timing(self.without) as step_done:
            for _ in range(steps):
                self._engine.train_step(self._batch)
                step_done()
        self._publish()  # all of those steps at once: not timed
        self._publisher.drain()
        self._engine.train_step(self._batch)
        self._publish()
        with _Timing(self.with_publishing) as step_done:
            for _ in range(steps):
                self._engine.train_step(self._batch)
                self.blocked_s.append(self._publish())
                step_done()
                if (done := self._publisher.published) is not None:
                    self.published.append((done.seconds, done.payload_bytes, done.changed_fraction))

    def forget(self) -> None:
        """What was timed so far: it was the warm-up."""
        self.with_publishing, self.without = _Steps(), _Steps()
        self.blocked_s, self.published = [], []

    def _publish(self) -> float:
        self.version += 1
        return self._publisher.publish(self._publisher.next_order(self.version))


class _Timing:
    """A context; call what it gives at the end of every step."""

    def __init__(self, into: _Steps) -> None:
        self._into = into

    def __enter__(self) -> Callable[[], None]:
        self._process_s, self._thread_s = time.process_time(), time.thread_time()
        self._at = time.perf_counter()
        return self._step_done

    def _step_done(self) -> None:
        now = time.perf_counter()
        self._into.wall_s.append(now - self._at)
        self._at = now

    def __exit__(self, *_: object) -> None:
        whole = time.process_time() - self._process_s
        self._into.whole_s += whole
        self._into.beside_s += whole - (time.thread_time() - self._thread_s)


def bench_publish(config: RunConfig, *, rounds: int, steps: int, tell: Callable[[str], object]) -> dict[str, Any]:
    """`rounds` times `steps` timed steps without publishing and `steps` with it, over a Valkey of its own; one rank.

    The batch is `learner.groups_per_step` groups of random tokens of `sampling.max_tokens` each. `beside` is processor time
    of this process outside the training thread, as a share of all of it.
    """
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder, EmbeddedValkey(Path(folder) / "hub") as hub:
        config = config.model_copy(update={"hub": config.hub.model_copy(update={"url": hub.url})})
        engine = LearnerEngine(
            config.model.path, config.learner, config.correction, run_seed=config.run.seed,
            temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens,
        )  # fmt: skip
        board = connect_hub(config)
        opening = EpochOpening(config.run.name, board.channel.open_epoch(), 0, 0)
        publisher = WeightPublisher(engine.share, lambda: connect_hub(config), config.channel, opening)
        try:
            publisher.open()
            bench = _Bench(config, engine, publisher)
            for number in range(1 + rounds):
                tell(f"round {number} of {rounds}" if number else "warm-up")
                bench.block(steps)
                if not number:
                    bench.forget()
            publisher.drain()
            labels = [e.label for e in board.channel.index()]
        finally:
            publisher.close()
            board.close()
    on, off = statistics.median(bench.with_publishing.wall_s), statistics.median(bench.without.wall_s)
    commit_s, size_bytes, changed = (statistics.median(column) for column in zip(*bench.published, strict=True))
    return {
        "parameters": sum(t.numel for t in engine.layout.tensors),
        "steps_timed": 2 * len(bench.without.wall_s),
        "step_s_without": round(off, 4),
        "step_s_with": round(on, 4),
        "step_ratio": round(on / off, 4),
        "blocked_s_median": round(statistics.median(bench.blocked_s), 5),
        "handed_over_to_committed_s_median": round(commit_s, 4),
        "cpu_share_beside_training_with": round(bench.with_publishing.share_beside, 4),
        "cpu_share_beside_training_without": round(bench.without.share_beside, 4),
        "delta_bytes_median": int(size_bytes),
        "changed_fraction_median": round(changed, 5),
        "skips": sum(label.startswith("skip") for label in labels),
        "codec_threads": config.channel.codec_threads,
    }


def random_batch(config: RunConfig, vocabulary: int) -> TrainBatch:
    """Groups of random tokens, half of whose rollouts are right: something to learn at every step."""
    rng = np.random.default_rng(config.run.seed)
    now, tokens = PolicyVersion(1, 0), config.sampling.max_tokens

    def rollout(sample: int) -> Rollout:
        ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
        logprobs = np.full(tokens, -np.log(vocabulary), np.float32)
        return Rollout(sample, ids, logprobs, (VersionSpan(now, 0),), float(sample % 2), "length", "", 0, 0)

    groups = [
        Group(
            config.run.name, "bench", "p", index, 0,
            rng.integers(0, vocabulary, min(16, config.task.max_prompt_tokens)).astype(np.int32), "", "",
            tuple(rollout(sample) for sample in range(config.sampling.group_size)),
        )
        for index in range(config.learner.groups_per_step)
    ]  # fmt: skip
    return build_batch(groups, now=now, forks={}, max_age=config.correction.max_age)
