"""One pass over a model in bounded memory: jobs worked on in threads, results taken in order, digests along the way.

Invariant: at most `threads` + 1 jobs are in memory at any time, and results are taken in the order of the jobs, so that
nothing depends on the number of threads. When anything fails, or Ctrl-C comes, no thread is at work any more when the
error leaves here: files may be closed. Held by tests/unit/deploy/test_delta_jobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import xxhash

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_states import State
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.kernels.digest import tensor_digest
from anabranch.kernels.workers import Workers
from anabranch.schemas.layout import DTYPE_BYTES, Layout, root_digest

Job = tuple[Piece, ...]
Result = TypeVar("Result")


def each_job(
    layout: Layout, work: Callable[[Job], Result], take: Callable[[Job, Result], None], what: str, *, threads: int
) -> None:
    """Call `work` for each job over `layout` in threads, and `take(job, result)` here, in order; shown as `what`."""
    jobs = plan_jobs(layout)
    with progress(what, layout.payload_bytes) as advance, Workers(threads) as workers:
        for job, result in zip(jobs, workers.in_order(work, jobs), strict=True):
            take(job, result)
            advance(sum(p.size for p in job) * DTYPE_BYTES[layout.tensors[job[0].tensor].dtype])


class StateDigest:
    """The root digest of a state whose tensors come in pieces: those of each tensor in order, tensors in any order."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hashers: dict[int, tuple[xxhash.xxh3_128, int]] = {}  # tensor -> its hasher, elements seen
        self._done = {t.name: tensor_digest(b"") for t in layout.tensors if t.numel == 0}

    def update(self, piece: Piece, bits: Bits) -> None:
        """Take in `bits` [piece.stop - piece.start]."""
        spec = self._layout.tensors[piece.tensor]
        hasher, seen = self._hashers.get(piece.tensor) or (xxhash.xxh3_128(), 0)
        assert piece.start == seen, f"{spec.name}: elements {seen} to {piece.start} were left out"
        hasher.update(bits.data)
        self._hashers[piece.tensor] = hasher, piece.stop
        if piece.stop == spec.numel:
            self._done[spec.name] = hasher.hexdigest()
            del self._hashers[piece.tensor]

    def update_job(self, job: Job, arrays: Sequence[Bits]) -> None:
        for piece, bits in zip(job, arrays, strict=True):
            self.update(piece, bits)

    def hexdigest(self) -> str:
        return root_digest(self._layout, self._done)


def state_digest(state: State, what: str, *, threads: int) -> str:
    """The root digest of `state`, all of which is read; shown as progress of `what`."""
    digest = StateDigest(state.layout)
    each_job(state.layout, state.pieces, digest.update_job, what, threads=threads)
    return digest.hexdigest()
