"""`anabranch delta verify`: whether a delta file is whole, fits a checkpoint, and makes what it says. Writes nothing.

Invariant: a file that passes with its base given can be applied to it; without the base, everything that can be known
without it has been checked. Held by tests/unit/deploy/test_delta_verify.py.
"""

from __future__ import annotations

from pathlib import Path

from anabranch.deploy.delta_apply import check_base, check_decoded
from anabranch.deploy.delta_diff import open_checkpoint
from anabranch.deploy.delta_jobs import state_digest
from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_stages import naming, read_stages
from anabranch.deploy.delta_states import AbsentState, State, StoredState, after
from anabranch.kernels.delta_codec import inspect_chunk
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.transport.checkpoint_files import first_difference
from anabranch.transport.delta_file import DeltaFile


def verify(delta: DeltaFile, *, base: Path | None, result: Path | None, threads: int) -> list[str]:
    """Check `delta`, against the checkpoints `base` and `result` if they are given. Returns what was found, in words.

    Raises:
        DeltaError: something is wrong.
        UsageError: a base for an anchor.
        OSError: a file cannot be read.
    """
    manifest = delta.header.manifest
    if manifest.kind == "anchor" and base is not None:
        raise UsageError(f"{delta.path} is an anchor, which has no base: leave --base out")
    found = [f"header: whole, {len(delta.header.layout.tensors)} tensors, codec {manifest.codec}"]
    _check_chunks(delta, threads)
    found.append(f"chunks: all {len(manifest.chunks)} have their digests and are well formed")
    if manifest.kind == "anchor":
        _decode(delta, AbsentState(delta.header.layout), threads)
        found.append(f"decoded: has the result digest {manifest.result_digest}")
    elif manifest.base is not None and base is not None:
        with open_checkpoint(base) as checkpoint:
            before = StoredState(checkpoint)
            check_base(before, delta, base, threads=threads)
            found.append(f"base: {base} has the base digest {manifest.base.digest}")
            _decode(delta, before, threads)
            found.append(f"decoded over {base}: has the result digest {manifest.result_digest}")
    if result is not None:
        _check_stored(delta, result, threads)
        found.append(f"result: {result} has the result digest {manifest.result_digest}")
    return found


def _check_chunks(delta: DeltaFile, threads: int) -> None:
    layout, manifest = delta.header.layout, delta.header.manifest
    read_stages([delta])  # digests, codec, heads; that chunks do not overlap, that an anchor is whole

    def changed(number: int) -> int:
        chunk = delta.chunk(number)
        with naming(delta, number):
            return inspect_chunk(layout, chunk).changed_elements

    total = 0
    with progress("inspecting", manifest.payload_bytes) as advance, Workers(threads) as workers:
        for chunk, count in zip(manifest.chunks, workers.in_order(changed, range(len(manifest.chunks))), strict=True):
            total += count
            advance(chunk.size_bytes)
    if total != manifest.changed_elements:
        raise DeltaError(
            f"{delta.path}: its chunks change {total} elements, its header says {manifest.changed_elements}"
        )


def _decode(delta: DeltaFile, before: State, threads: int) -> None:
    check_decoded(state_digest(after([delta], before), f"decoding {delta.path.name}", threads=threads), delta)


def _check_stored(delta: DeltaFile, result: Path, threads: int) -> None:
    with open_checkpoint(result) as checkpoint:
        difference = first_difference(checkpoint.layout, delta.header.layout, here=str(result), there=str(delta.path))
        if difference:
            raise DeltaError(f"{delta.path} is for another model: {difference}")
        digest = state_digest(StoredState(checkpoint), f"checking {result.name}", threads=threads)
    if digest != delta.header.manifest.result_digest:
        raise DeltaError(f"{result} has digest {digest}, {delta.path} makes {delta.header.manifest.result_digest}")
