"""States read in pieces: any chunking of a file gives the same bits, and one that would cost too much is refused."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from anabranch.deploy import delta_states
from anabranch.deploy.delta_states import AbsentState, HeldPieces, after
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import TensorChange
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.transport.delta_file import DeltaFile
from tests.unit.deploy.delta_files import LAYOUT, MemoryState, assert_same, cut, read, states, write


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


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    old, new = states(2)
    with DeltaFile(write(tmp_path / "d", [(old, new, cut(64))])) as delta:
        state = after([delta], old)
        job = cut(64)[0]
        state.pieces(job)[0][:] = 0
        assert_same(state.pieces([Piece(0, 0, 900)]), MemoryState([new.tensors[0]]))


@pytest.mark.parametrize("seed", range(20))
def test_stages_that_are_cut_at_random(tmp_path: Path, seed: int) -> None:
    """Chunks of pieces from anywhere in a dtype, in an order of their own at each stage."""
    rng = np.random.default_rng(seed)
    made = states(4, share=float(rng.choice([0.01, 0.1, 0.9])))

    def jobs() -> list[tuple[Piece, ...]]:
        pieces = [piece for job in cut(int(rng.integers(5, 300))) for piece in job]
        owner = rng.integers(0, 6, len(pieces))
        dtypes = [LAYOUT.tensors[piece.tensor].dtype for piece in pieces]
        chosen = [(d, n) for d in ("bf16", "f32", "u8") for n in range(6)]
        return [
            job
            for dtype, number in chosen
            if (job := tuple(p for p, d, o in zip(pieces, dtypes, owner, strict=True) if (d, o) == (dtype, number)))
        ]

    path = write(tmp_path / "d", [(a, b, jobs()) for a, b in pairwise(made)])
    assert_same(read(path, made[0], cut(int(rng.integers(20, 2000)))), made[-1])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each chunk is decoded."""
    counts: Counter[bytes] = Counter()
    real = delta_states.decode_chunk

    def counting(layout: Layout, content: bytes, base: Any) -> list[TensorChange]:
        counts[content] += 1
        return real(layout, content, base)

    monkeypatch.setattr(delta_states, "decode_chunk", counting)
    return counts


def test_a_file_cut_as_the_reader_would_is_decoded_once(
    tmp_path: Path, decoded: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 100)
    made = states(9)
    path = write(tmp_path / "d", [(a, b, cut(100)) for a, b in pairwise(made)])
    assert_same(read(path, made[0], cut(100)), made[-1])
    assert set(decoded.values()) == {1}


def test_the_price_of_stages_does_not_multiply(
    tmp_path: Path, decoded: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history of a program that cut otherwise: three jobs have an element of a chunk, at every stage."""
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 100)
    made = states(25, share=0.5)
    path = write(tmp_path / "d", [(a, b, cut(140)) for a, b in pairwise(made)])
    assert_same(read(path, made[0], cut(100)), made[-1])
    assert max(decoded.values()) <= 3


def test_chunks_that_are_scattered_over_the_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be decoded for every job that it has an element of."""
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 8)
    old, new = states(2, share=1.0)
    scattered = [tuple(Piece(0, at, at + 1) for at in range(0, 900, 8))]
    path = write(tmp_path / "d", [(old, new, scattered)])
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match=r"d: its chunks .* more than 32 times"):
        after([delta], old)
    monkeypatch.setattr(delta_states, "_MAX_DECODES", 113)
    with DeltaFile(path) as delta:
        after([delta], old)


def test_what_would_hold_too_much_of_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first stage only what is asked for is held, of a later one all that its chunks are over."""
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 100)
    monkeypatch.setattr(delta_states, "_MAX_HELD", 900)
    a, b, c = states(3, share=0.02)
    with DeltaFile(write(tmp_path / "1", [(a, b, cut(5000))])) as delta:
        after([delta], a)
    path = write(tmp_path / "2", [(a, b, cut(100)), (b, c, cut(5000))])
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="elements of the model would be held"):
        after([delta], a)


def test_very_many_pieces_of_one_tensor_take_no_time_to_find() -> None:
    layout = Layout.build([("w", "u8", (2**18,))])
    pieces = [Piece(0, start, start + 2) for start in range(0, 2**18, 4)]
    held = HeldPieces(layout, pieces, [np.zeros(2, np.uint8) for _ in pieces])
    began = monotonic()
    for piece in pieces:
        held.set(TensorChange("w", np.array([piece.start + 1]), np.array([7], np.uint8)))
        assert list(held.read("w", piece.start, piece.stop)) == [0, 7]
    assert monotonic() - began < 20, "2^16 pieces, each looked for among all: minutes"


@pytest.mark.parametrize("dense", [False, True])
def test_a_change_reaches_the_pieces_it_is_over_and_nothing_else(dense: bool) -> None:
    layout = Layout.build([("v", "u8", (100,)), ("w", "u8", (100,))])
    pieces = [Piece(1, 10, 20), Piece(1, 20, 25), Piece(1, 40, 41), Piece(0, 0, 100)]
    for start in range(0, 60):
        for size in (0, 1, 3, 35):
            held = HeldPieces(layout, pieces, [np.zeros(p.stop - p.start, np.uint8) for p in pieces])
            expected = np.zeros(100, np.uint8)
            expected[start : start + size] = np.arange(1, size + 1)
            bits = expected[start : start + size].copy()
            held.set(TensorChange("w", None if dense else np.arange(start, start + size), bits, start if dense else 0))
            for p in pieces[:3]:
                np.testing.assert_array_equal(held.read("w", p.start, p.stop), expected[p.start : p.stop])
            assert not held.read("v", 0, 100).any()


def test_very_many_stages_are_no_deep_recursion(tmp_path: Path) -> None:
    a, b = states(2, share=0.01)
    path = write(tmp_path / "d", [(a, b, cut(5000)), (b, a, cut(5000))] * 700 + [(a, b, cut(5000))])
    assert_same(read(path, a, cut(5000)), b)


def test_stages_without_chunks_are_passed_over(tmp_path: Path) -> None:
    a, b = states(2)
    path = write(tmp_path / "d", [(a, a, cut(64)), (a, b, cut(64)), (b, b, cut(64))])
    assert_same(read(path, a, cut(64)), b)
