"""Making a delta file of two states, or an anchor file of one, in a single pass.

Invariant: the file's digests are those of the very bits that were encoded, and the same states give the same file for
any number of threads. Held by tests/unit/deploy/test_delta_diff.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from anabranch.deploy.delta_jobs import Job, StateDigest, each_job, job_sums
from anabranch.deploy.delta_states import HeldPieces, State
from anabranch.kernels.delta_codec import CODEC, JobResult, encode_job
from anabranch.kernels.digest import Sums
from anabranch.schemas.delta_file import DeltaHeader, FileManifest
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk
from anabranch.transport.delta_file import DeltaWriter


@dataclass(frozen=True)
class Labels:
    """What the manifest calls the two states; the binding to their bits are the digests."""

    run: str
    epoch: int
    version: int
    base_version: int | None
    learner_step: int
    fork_version: int = 0
    published_ms: int = 0  # files that were made of files have no time: they come out the same whenever they are made


@dataclass(frozen=True)
class WrittenDelta:
    """The header of a delta file, and the size of the whole."""

    header: DeltaHeader
    size_bytes: int


def write_delta(
    out: Path, before: State | None, new: State, labels: Labels, *, threads: int, expected_result: str | None = None
) -> WrittenDelta:
    """Write what changes from `before` to `new`, or all of `new` when `before` is None, to the file `out`.

    Raises:
        DeltaError: `new` has another digest than `expected_result`.
        OSError, UsageError, TemporaryError: as `DeltaWriter`.
    """
    layout = new.layout
    changed: Counter[int] = Counter()
    base_digest, result_digest = StateDigest(layout), StateDigest(layout)

    def work(job: Job) -> tuple[list[Sums], list[Sums], JobResult]:
        new_bits = new.pieces(job)
        new_sums, source = job_sums(job, new_bits), HeldPieces(layout, job, new_bits)
        if before is None:
            return [], new_sums, encode_job(layout, job, None, source)
        old_bits = before.pieces(job)
        return job_sums(job, old_bits), new_sums, encode_job(layout, job, HeldPieces(layout, job, old_bits), source)

    with DeltaWriter(out) as writer:

        def take(job: Job, done: tuple[list[Sums], list[Sums], JobResult]) -> None:
            old_sums, new_sums, result = done
            writer.add(result.chunks)
            changed.update(result.changed)
            result_digest.add(job, new_sums)
            if before is not None:
                base_digest.add(job, old_sums)

        each_job(layout, work, take, f"encoding {out.name}", threads=threads)
        if expected_result not in (None, result_digest.hexdigest()):
            raise DeltaError(f"the state that results has digest {result_digest.hexdigest()}, not {expected_result}")

        counts = tuple(changed[number] for number in range(len(layout.tensors)))
        digests = base_digest.hexdigest() if before is not None else None, result_digest.hexdigest()
        manifest = make_manifest(labels, layout, digests, tuple(writer.chunks), sum(counts))
        header = DeltaHeader(manifest, layout, counts, (len(writer.chunks),))
        return WrittenDelta(header, writer.finish(header))


def make_manifest(
    labels: Labels, layout: Layout, digests: tuple[str | None, str], chunks: tuple[Chunk, ...], changed_elements: int
) -> FileManifest:
    """`digests`: of the base (None: an anchor) and of the result."""
    base = None
    if digests[0] is not None and labels.base_version is not None:
        base = Base(epoch=labels.epoch, version=labels.base_version, digest=digests[0])
    return FileManifest(
        run=labels.run,
        epoch=labels.epoch,
        version=labels.version,
        base=base,
        result_digest=digests[1],
        layout_hash=layout.hash,
        codec=CODEC,
        chunks=chunks,
        full_bytes=layout.payload_bytes,
        changed_elements=changed_elements,
        total_elements=sum(t.numel for t in layout.tensors),
        learner_step=labels.learner_step,
        fork_version=labels.fork_version,
        published_ms=labels.published_ms,
    )
