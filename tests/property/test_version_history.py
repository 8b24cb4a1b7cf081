"""Any state that is kept reads as if every state had been copied; the versions that skips need are kept; memory is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import encode_job
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.kernels.digest import subtract_sums, tensor_sums
from anabranch.kernels.undo import merge_undo, put_bits
from anabranch.learner.shares import ShareImage
from anabranch.learner.version_history import Change, VersionGoneError, VersionHistory
from anabranch.schemas.layout import Layout

LAYOUT = Layout.build([("a", "bf16", (130,)), ("b", "f32", (70,)), ("c", "u8", (40,))])
SHARE = (Piece(0, 10, 125), Piece(1, 0, 70), Piece(2, 5, 40))


class Lab:
    """A history beside copies of all states."""

    def __init__(self, start: int, *, levels: int, memory_bytes: int = 2**30, chunk_elements: int = 64) -> None:
        self.jobs = plan_jobs(LAYOUT, pieces=SHARE, chunk_elements=chunk_elements)
        image = ShareImage(LAYOUT, SHARE)
        self.rng = np.random.default_rng(0)
        for piece in SHARE:
            image.bits(piece)[:] = self.rng.integers(0, 250, piece.size)
        self.live = ShareImage(LAYOUT, SHARE)
        self.live.copy_from(image)
        self.history = VersionHistory(image, self.jobs, start, levels=levels, memory_bytes=memory_bytes)
        self.states = {start: self._copy()}

    def _copy(self) -> list[Any]:
        return [self.live.bits(piece).copy() for piece in SHARE]

    def step(self, density: float) -> None:
        for piece in SHARE:
            bits = self.live.bits(piece)
            bits[self.rng.random(bits.size) < density] += 1
        changes = []
        for job in self.jobs:
            result = encode_job(LAYOUT, job, self.history.at(self.history.head), self.live)
            changes += [Change.of(part) for part in result.parts]
        self.history.advance(self.history.head + 1, changes)
        self.states[self.history.head] = self._copy()

    def check(self) -> None:
        for version in self.history.versions():
            source = self.history.at(version)
            for piece, expected in zip(SHARE, self.states[version], strict=True):
                name = LAYOUT.tensors[piece.tensor].name
                assert np.array_equal(source.read(name, piece.start, piece.stop), expected), version
                assert np.array_equal(source.read(name, piece.start + 3, piece.stop - 1), expected[3:-1]), version

    def tidy(self) -> None:
        while self.history.tidy():
            pass


def bases(version: int, start: int, levels: int) -> set[int]:
    """Where skips that end in `version` begin."""
    return {version - 2**k for k in range(1, levels + 1) if version % 2**k == 0 and version - 2**k >= start}


@given(
    st.integers(0, 21),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.3, 0.9]), st.integers(0, 30)), min_size=1, max_size=40),
)
@settings(max_examples=40)
def test_every_version_that_is_kept_reads_as_it_was(start: int, levels: int, steps: list[tuple[float, int]]) -> None:
    lab = Lab(start, levels=levels)
    for density, merges in steps:
        lab.step(density)
        wanted = bases(lab.history.head, start, levels)
        assert wanted <= set(lab.history.versions())
        for version in wanted:  # as the compactor does
            lab.history.pin(version)
        for _ in range(merges):  # of which some are cut short by the next step
            lab.history.tidy()
        lab.check()
        assert wanted <= set(lab.history.versions())
        for version in wanted:
            lab.history.unpin(version)
    lab.tidy()
    lab.check()
    assert len(lab.history.versions()) <= 2 * levels + 1


def test_a_pinned_version_stays_and_goes_when_it_is_let_go() -> None:
    lab = Lab(0, levels=1)
    for _ in range(3):
        lab.step(0.1)
    lab.history.pin(3)
    for _ in range(8):
        lab.step(0.1)
        lab.tidy()
    assert 3 in lab.history.versions()
    lab.check()
    lab.history.unpin(3)
    lab.tidy()
    assert 3 not in lab.history.versions()
    with pytest.raises(VersionGoneError, match="version 3"):
        lab.history.at(3).read("a", 10, 20)


def test_memory_is_bounded_by_giving_up_the_oldest_first() -> None:
    limit = 700
    free, bounded = Lab(0, levels=6), Lab(0, levels=6, memory_bytes=limit)
    lost = 0
    for _ in range(70):
        for lab in (free, bounded):
            lab.step(0.2)
            lab.tidy()
            lab.check()
        assert bounded.history.nbytes <= limit
        kept, all_kept = bounded.history.versions(), free.history.versions()
        assert kept == all_kept[len(all_kept) - len(kept) :]
        lost += len(all_kept) - len(kept)
    assert lost > 0
    assert free.history.nbytes > limit


def test_records_never_weigh_more_than_a_copy_of_every_kept_state() -> None:
    lab = Lab(0, levels=3)
    for _ in range(40):
        lab.step(0.9)
    lab.tidy()
    assert lab.history.nbytes <= (len(lab.history.versions()) - 1) * sum(lab.live.bits(piece).nbytes for piece in SHARE)
    lab.check()


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_a_change_takes_less_memory_than_what_it_changes_and_says_how_the_digest_moves(density: float) -> None:
    lab = Lab(0, levels=1)
    for piece in SHARE:
        bits = lab.live.bits(piece)
        bits[lab.rng.random(bits.size) < density] += 1
    for job in lab.jobs:
        for part in encode_job(LAYOUT, job, lab.history.at(0), lab.live).parts:
            change, start = Change.of(part), part.piece.start
            assert change.sums() == subtract_sums(tensor_sums(part.new, start), tensor_sums(part.old, start))
            if change.indices is None:
                assert np.shares_memory(change.new, part.new), "not a copy"
            else:
                assert change.indices.nbytes + change.old.nbytes < part.old.nbytes
            assert change.count == part.changed


def test_no_record_is_left_when_nothing_is_kept() -> None:
    lab = Lab(0, levels=0)
    for _ in range(5):
        lab.step(0.3)
        lab.tidy()
        assert (lab.history.nbytes, lab.history.versions()) == (0, [lab.history.head])


@given(st.data())
def test_a_merged_record_undoes_both(data: st.DataObject) -> None:
    indices = st.lists(st.integers(0, 50), unique=True).map(lambda x: np.array(sorted(x), np.uint32))
    first, second = data.draw(indices), data.draw(indices)
    before = np.arange(51, dtype=np.uint16)
    middle, after = before.copy(), before.copy()
    middle[first] += 100
    after[:] = middle
    after[second] += 1000
    put_bits(after, *merge_undo((first, before[first]), (second, middle[second])))
    assert np.array_equal(after, before)
