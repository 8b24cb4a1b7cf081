"""What is made beside the steps: which skips are due, in which order, and what is declined instead of waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from anabranch.kernels.delta_codec import encode_job
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.learner.compactor import Compactor, Outcome, due
from anabranch.learner.shares import ArrayShare
from anabranch.learner.uploads import Uploads
from anabranch.learner.version_history import Change, VersionHistory
from anabranch.schemas.errors import ConfigError
from anabranch.schemas.layout import Layout
from anabranch.transport.memory_blob_store import MemoryBlobStore
from tests.publishers import Gate

LAYOUT = Layout.build([("a", "bf16", (300,)), ("b", "f32", (50,))])


def test_skips_are_due_at_aligned_versions_from_the_fork_on() -> None:
    def labels(version: int, fork_version: int = 0, levels: int = 4, anchor: bool = False) -> list[str]:
        return [t.label for t in due(version, version, fork_version=fork_version, levels=levels, anchor=anchor)]

    assert [labels(v) for v in (1, 2, 4, 12, 16)] == [
        [], ["skip2"], ["skip2", "skip4"], ["skip2", "skip4"], ["skip2", "skip4", "skip8", "skip16"],
    ]  # fmt: skip
    assert labels(32) == ["skip2", "skip4", "skip8", "skip16"], "no longer than levels says"
    assert labels(8, fork_version=5) == ["skip2"]
    assert labels(8, fork_version=4) == ["skip2", "skip4"]
    assert labels(6, anchor=True) == ["skip2", "anchor"]
    assert labels(6, levels=0) == []


class Lab:
    def __init__(self, *, memory_bytes: int = 2**30) -> None:
        rng = self.rng = np.random.default_rng(0)
        self.state = {"a": rng.integers(0, 999, 300).astype(np.uint16), "b": rng.integers(0, 999, 50).astype(np.uint32)}
        self.share = ArrayShare(LAYOUT, self.state)
        image = self.share.image()
        self.share.copy_to(image)
        self.jobs = plan_jobs(LAYOUT, pieces=self.share.pieces, chunk_elements=100)
        self.history = VersionHistory(image, self.jobs, 0, levels=3, memory_bytes=memory_bytes)
        self.gate, self.held = Gate(), False
        self.error: Exception | None = None
        self.blobs = MemoryBlobStore()
        inner = self.blobs.put

        def put(payload: bytes) -> str:
            if self.held:
                self.gate.pass_through()
            if self.error:
                raise self.error
            return inner(payload)

        self.blobs.put = put  # type: ignore[method-assign]
        self.uploads = Uploads(self.blobs, 1, deadline_s=0.2, stopping=threading.Event())
        self.outcomes: list[Outcome] = []
        self.compactor = Compactor(
            LAYOUT, self.jobs, self.history, self.uploads, fork_version=0, levels=3, done=self.outcomes.append
        )

    def step(self, *, anchor: bool = False) -> None:
        for bits in self.state.values():
            bits[self.rng.random(bits.size) < 0.2] += 1
        new = self.share.image()
        self.share.copy_to(new)
        base = self.history.at(self.history.head)
        changes = [Change.of(p) for job in self.jobs for p in encode_job(LAYOUT, job, base, new).parts]
        self.history.advance(self.history.head + 1, changes)
        self.compactor.plan(self.history.head, self.history.head, anchor=anchor)

    def work(self) -> None:
        while self.compactor.work() is not None:
            pass

    def done(self) -> list[tuple[int, str, bool]]:
        return [(o.task.version, o.task.label, not o.declined) for o in self.outcomes]


def test_everything_that_is_due_is_made_in_order() -> None:
    lab = Lab()
    for version in range(1, 9):
        lab.step(anchor=version == 4)
        lab.work()
    assert lab.done() == [
        (2, "skip2", True), (4, "skip2", True), (4, "skip4", True), (4, "anchor", True), (6, "skip2", True),
        (8, "skip2", True), (8, "skip4", True), (8, "skip8", True),
    ]  # fmt: skip
    assert all(lab.blobs.get(c.digest, c.size_bytes) for o in lab.outcomes for c in o.chunks)
    while lab.history.tidy():
        pass
    assert lab.history.versions() == [8]


def test_it_may_be_interrupted_between_any_two_jobs() -> None:
    """A version that is published meanwhile moves the image on; what was planned reads the state that it was planned of."""
    straight, interrupted = Lab(), Lab()
    for _ in range(4):
        straight.step()
        straight.work()
    for _ in range(4):
        interrupted.step()
        interrupted.compactor.work()
    interrupted.work()
    assert interrupted.done() == straight.done()
    assert [o.chunks for o in interrupted.outcomes] == [o.chunks for o in straight.outcomes]


def test_no_job_waits_for_an_upload() -> None:
    lab = Lab()
    lab.held = True
    for _ in range(2):
        lab.step()
    calls = [lab.compactor.work() for _ in range(50)]
    assert lab.gate.reached.wait(20)
    assert calls[-1], "it has more to do, later"
    assert lab.outcomes == []
    lab.gate.open()
    lab.work()
    assert lab.done() == [(2, "skip2", True)]


def test_what_is_late_is_declined_and_its_versions_are_let_go() -> None:
    lab = Lab()
    for _ in range(12):
        lab.step()
    lab.work()
    made = {(v, label): made for v, label, made in lab.done()}
    assert made[2, "skip2"] is False
    assert made[4, "skip4"] is True
    assert all(made[v, "skip2"] for v in (6, 8, 10, 12))
    while lab.history.tidy():
        pass
    assert lab.history.versions() == [8, 12]


def test_without_memory_it_declines_and_says_why() -> None:
    lab = Lab(memory_bytes=0)
    for _ in range(2):
        lab.step()
    lab.work()
    assert [o.declined for o in lab.outcomes] == ["channel.skip_memory_bytes is used up"]


def test_a_store_that_does_not_take_it_costs_this_manifest_alone() -> None:
    from anabranch.schemas.errors import StreamUnavailableError

    lab = Lab()
    lab.error = StreamUnavailableError("away")
    for _ in range(2):
        lab.step()
    lab.work()
    assert [(o.task.label, "away" in o.declined) for o in lab.outcomes] == [("skip2", True)]
    lab.error = ConfigError("access denied")
    for _ in range(2):
        lab.step()
    with pytest.raises(ConfigError, match="access denied"):
        lab.work()
