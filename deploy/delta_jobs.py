"""One pass over a model in bounded memory: jobs worked on in threads, results taken in order, digests along the way.

Invariant: at most `threads` + 1 jobs are in memory at any time, and results are taken in the order of the jobs, so that
nothing depends on the number of threads. When anything fails, or Ctrl-C comes, no thread is at work any more when the
error leaves here: files may be closed. Held by tests/unit/deploy/test_delta_jobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_states import State
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.kernels.digest import NOTHING, Sums, add_sums, digest_of_sums, tensor_sums
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


def job_sums(job: Job, arrays: Sequence[Bits]) -> list[Sums]:
    """What each piece of `job`, whose bits are `arrays`, contributes to its tensor's digest. Runs in the job's thread."""
    return [tensor_sums(bits, piece.start) for piece, bits in zip(job, arrays, strict=True)]


class StateDigest:
    """The root digest of a state that comes in pieces, in any order, every element once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: list[Sums] = [NOTHING] * len(layout.tensors)
        self._missing = [t.numel for t in layout.tensors]

    def add(self, job: Job, sums: Sequence[Sums]) -> None:
        """Take in `sums`, which `job_sums` made of `job`."""
        for piece, each in zip(job, sums, strict=True):
            self._sums[piece.tensor] = add_sums(self._sums[piece.tensor], each)
            self._missing[piece.tensor] -= piece.size

    def hexdigest(self) -> str:
        assert not any(self._missing), "every element is taken in once"
        names = [t.name for t in self._layout.tensors]
        return root_digest(self._layout, dict(zip(names, map(digest_of_sums, self._sums), strict=True)))


def state_digest(state: State, what: str, *, threads: int) -> str:
    """The root digest of `state`, all of which is read; shown as progress of `what`."""
    digest = StateDigest(state.layout)
    each_job(state.layout, lambda job: job_sums(job, state.pieces(job)), digest.add, what, threads=threads)
    return digest.hexdigest()
