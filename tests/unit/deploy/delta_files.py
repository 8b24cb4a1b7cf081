"""Delta files cut in any way, of states in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from anabranch.deploy.delta_states import HeldPieces, State, after
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import CODEC, encode_job
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.delta_file import DeltaHeader, FileManifest
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base
from anabranch.transport.delta_file import DeltaFile, DeltaWriter

LAYOUT = Layout.build([("a", "bf16", (900,)), ("b", "f32", (30, 20)), ("c", "bf16", (100,)), ("d", "u8", (50,))])
SIZES = {t.name: t.numel for t in LAYOUT.tensors}
ZERO = "0" * 32
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
            "run": "r", "epoch": 0, "version": 1, "result_digest": ZERO,
            "base": Base(epoch=0, version=0, digest=ZERO) if is_delta else None,
            "layout_hash": LAYOUT.hash, "codec": CODEC, "chunks": tuple(writer.chunks),
            "full_bytes": LAYOUT.payload_bytes, "changed_elements": sum(changed), "total_elements": sum(SIZES.values()),
            "learner_step": 1, "fork_version": 0, "published_ms": 0,
        }  # fmt: skip
        manifest = FileManifest.model_validate({**fields, **changes})
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
