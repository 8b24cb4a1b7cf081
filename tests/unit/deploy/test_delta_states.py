"""States read in pieces: any chunking of a file gives the same bits, and one that would cost too much is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from anabranch.deploy import delta_states
from anabranch.deploy.delta_states import AbsentState, HeldPieces, State, after
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import CODEC, encode_job
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.delta_file import DeltaHeader
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.transport.delta_file import DeltaFile, DeltaWriter

LAYOUT = Layout.build([("a", "bf16", (900,)), ("b", "f32", (30, 20)), ("c", "bf16", (100,)), ("d", "u8", (50,))])
SIZES = {t.name: t.numel for t in LAYOUT.tensors}
ZERO = xxhash.xxh3_128_hexdigest(b"")
Jobs = Sequence[tuple[Piece, ...]]


class MemoryState:
    layout = LAYOUT

    def __init__(self, tensors: Sequence[Bits]) -> None:
        self.tensors = tensors

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        return [self.tensors[p.tensor][p.start : p.stop].copy() for p in wanted]


def states(count: int, *, share: float = 0.1) -> list[MemoryState]:
    rng = np.random.default_rng(0)
    made = [[rng.integers(0, 200, t.numel).astype(uint_dtype(t.dtype)) for t in LAYOUT.tensors]]
    for _ in range(count - 1):
        made.append([(t + (rng.random(t.size) < share)).astype(t.dtype) for t in made[-1]])
    return [MemoryState(tensors) for tensors in made]


def cut(elements: int) -> Jobs:
    return plan_jobs(LAYOUT, chunk_elements=elements)


def write(path: Path, stages: Sequence[tuple[State | None, State, Jobs]], **changes: object) -> Path:
    """A delta file with one stage per (before, after, how it is cut)."""
    with DeltaWriter(path) as writer:
        ends = [0]
        changed = [0] * len(LAYOUT.tensors)
        for before, new, jobs in stages:
            for job in jobs:
                base = HeldPieces(LAYOUT, job, before.pieces(job)) if before is not None else None
                result = encode_job(LAYOUT, job, base, HeldPieces(LAYOUT, job, new.pieces(job)))
                writer.add(result.chunks)
                for tensor, count in result.changed.items():
                    changed[tensor] += count
            ends.append(len(writer.chunks))
        is_delta = stages[0][0] is not None
        fields: dict[str, object] = {
            "kind": "delta" if is_delta else "anchor", "run": "r", "epoch": 0, "version": 1,
            "base_version": 0 if is_delta else None, "base_digest": ZERO if is_delta else None, "result_digest": ZERO,
            "layout_hash": LAYOUT.hash, "codec": CODEC, "chunks": tuple(writer.chunks),
            "full_bytes": LAYOUT.payload_bytes, "changed_elements": sum(changed), "total_elements": sum(SIZES.values()),
            "learner_step": 1, "fork_version": 0, "published_ms": 0,
        }  # fmt: skip
        manifest = Manifest.model_validate({**fields, **changes})
        sizes = tuple(b - a for a, b in pairwise(ends))
        writer.finish(DeltaHeader(manifest, LAYOUT, tuple(changed), sizes))
    return path


def read(path: Path, before: State, jobs: Jobs) -> list[Bits]:
    """Every tensor of the state after the file at `path`, read job by job."""
    out = [np.zeros(t.numel, uint_dtype(t.dtype)) for t in LAYOUT.tensors]
    with DeltaFile(path) as delta:
        state = after([delta], before)
        for job in jobs:
            for piece, bits in zip(job, state.pieces(job), strict=True):
                out[piece.tensor][piece.start : piece.stop] = bits
    return out


def assert_same(got: Sequence[Bits], expected: MemoryState) -> None:
    for one, other in zip(got, expected.tensors, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
@pytest.mark.parametrize("written", [7, 33, 64, 100, 999, 1000, 5000])
@pytest.mark.parametrize("wanted", [7, 64, 100, 700, 5000])
def test_any_cut_gives_the_same_bits(
    tmp_path: Path, written: int, wanted: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the writer's jobs and the reader's lie over each other."""
    old, new = states(2, share=share)
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", written)
    path = write(tmp_path / "d", [(old, new, plan_jobs(LAYOUT))])
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", wanted)
    monkeypatch.setattr(delta_states, "_MAX_DECODES", 1000)  # a chunk of 5000 elements lies over all jobs of 7
    assert_same(read(path, old, plan_jobs(LAYOUT)), new)


@pytest.mark.parametrize("cuts", [(64, 64, 64), (100, 37, 5000), (5000, 64, 100)])
def test_stages_follow_on_each_other(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    a, b, c, d = states(4)
    path = write(tmp_path / "d", [(a, b, cut(cuts[0])), (b, c, cut(cuts[1])), (c, d, cut(cuts[2]))])
    assert_same(read(path, a, cut(80)), d)


def test_a_file_on_a_file(tmp_path: Path) -> None:
    a, b, c = states(3)
    first, second = write(tmp_path / "1", [(a, b, cut(50))]), write(tmp_path / "2", [(b, c, cut(70))])
    with ExitStack() as stack:
        one, two = (stack.enter_context(DeltaFile(path)) for path in (first, second))
        state = after([one, two], a)
        assert_same(state.pieces([Piece(i, 0, t.numel) for i, t in enumerate(LAYOUT.tensors)]), c)


def test_an_anchor_needs_nothing_before_it(tmp_path: Path) -> None:
    (state,) = states(1)
    path = write(tmp_path / "d", [(None, state, cut(64))])
    assert_same(read(path, AbsentState(LAYOUT), cut(50)), state)


def test_an_anchor_that_holds_changes_is_refused(tmp_path: Path) -> None:
    (new,) = states(1)
    zero = MemoryState([np.zeros_like(t) for t in new.tensors])
    one = MemoryState([np.ones_like(t) for t in new.tensors])
    path = write(tmp_path / "d", [(zero, one, cut(5000))], kind="anchor", base_version=None, base_digest=None)
    with DeltaFile(path) as delta:
        sparse_chunks = [n for n in delta.stage(0) if delta.chunk(n)[0] >> 4 == 1]
        assert sparse_chunks, "everything stepped by one: sparse is smaller"
        with pytest.raises(DeltaError, match="no base for them"):
            after([delta], AbsentState(LAYOUT))


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    old, new = states(2)
    with DeltaFile(write(tmp_path / "d", [(old, new, cut(64))])) as delta:
        state = after([delta], old)
        job = cut(64)[0]
        state.pieces(job)[0][:] = 0
        assert_same(state.pieces([Piece(0, 0, 900)]), MemoryState([new.tensors[0]]))


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    old, new = states(2)
    jobs = [(Piece(0, 0, 500),), (Piece(0, 499, 900),)]
    with DeltaFile(write(tmp_path / "d", [(old, new, jobs)])) as delta, pytest.raises(DeltaError, match="both hold"):
        after([delta], old)


def test_chunks_that_are_scattered_over_the_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be decoded for every job that it has an element of."""
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 8)
    old, new = states(2, share=1.0)
    scattered = [tuple(Piece(0, at, at + 1) for at in range(0, 900, 8))]
    with (
        DeltaFile(write(tmp_path / "d", [(old, new, scattered)])) as delta,
        pytest.raises(DeltaError, match="113 times"),
    ):
        after([delta], old)
    monkeypatch.setattr(delta_states, "_MAX_DECODES", 113)
    with DeltaFile(tmp_path / "d") as delta:
        after([delta], old)


def test_the_price_of_stages_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 100)
    a, b, c = states(3)
    path = write(tmp_path / "d", [(a, b, cut(5000)), (b, c, cut(5000))])  # 10 jobs of bf16 under one chunk
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="100 times"):
        after([delta], a)


def test_very_many_stages_are_no_deep_recursion(tmp_path: Path) -> None:
    a, b = states(2, share=0.01)
    path = write(tmp_path / "d", [(a, b, cut(5000)), (b, a, cut(5000))] * 700 + [(a, b, cut(5000))])
    assert_same(read(path, a, cut(5000)), b)


def test_stages_without_chunks_are_passed_over(tmp_path: Path) -> None:
    a, b = states(2)
    path = write(tmp_path / "d", [(a, a, cut(64)), (a, b, cut(64)), (b, b, cut(64))])
    assert_same(read(path, a, cut(64)), b)


def test_another_codec_is_refused(tmp_path: Path) -> None:
    old, new = states(2)
    path = write(tmp_path / "d", [(old, new, cut(64))], codec="class-golomb/2")
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="class-golomb/2"):
        after([delta], old)


def test_a_damaged_chunk_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    old, new = states(2)
    path = write(tmp_path / "d", [(old, new, cut(5000))])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="damaged"):
        after([delta], old)
