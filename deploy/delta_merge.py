"""`anabranch delta merge`: several delta files, one after another, as one.

Invariant: applying the merged file equals applying the files in turn; files that do not follow on each other, by digest
and by run and epoch, are refused. Held by tests/unit/deploy/test_delta_merge.py.

Where a change lies is coded relative to the weights it applies to, so two deltas cannot be made one without them: without
a base the merged file holds the chunks of all, as stages. With the base, or when the first file is an anchor, they are
applied in passing and encoded anew: elements that changed and changed back are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from anabranch.deploy.delta_apply import check_base
from anabranch.deploy.delta_diff import open_checkpoint
from anabranch.deploy.delta_encode import Labels, WrittenDelta, make_manifest, write_delta
from anabranch.deploy.delta_states import AbsentState, State, StoredState, after
from anabranch.schemas.delta_file import DeltaHeader
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.transport.checkpoint_files import first_difference
from anabranch.transport.delta_file import DeltaFile, DeltaWriter


def merge(paths: Sequence[Path], out: Path, *, base: Path | None, threads: int) -> WrittenDelta:
    """Write to `out` what the files at `paths` do one after another; `base`: the checkpoint that the first applies to.

    Raises:
        DeltaError: a damaged file; files that do not follow on each other; another base.
        UsageError: a base for an anchor; an anchor after a delta; versions that do not grow.
        OSError, TemporaryError: a file cannot be read or written.
    """
    with ExitStack() as stack:
        deltas = [stack.enter_context(DeltaFile(path)) for path in paths]
        for earlier, later in pairwise(deltas):
            _check_succession(earlier, later)
        labels = _labels(deltas[0], deltas[-1])
        if deltas[0].header.manifest.kind == "anchor":
            if base is not None:
                raise UsageError(f"{deltas[0].path} is an anchor, which has no base: leave --base out")
            return _encode_anew(None, deltas, out, labels, threads)
        if base is None:
            return _concatenate(deltas, out, labels)
        before = StoredState(stack.enter_context(open_checkpoint(base)))
        check_base(before, deltas[0], base, threads=threads)
        return _encode_anew(before, deltas, out, labels, threads)


def _check_succession(earlier: DeltaFile, later: DeltaFile) -> None:
    a, b = earlier.header.manifest, later.header.manifest
    if b.base is None:
        raise UsageError(f"{later.path} is an anchor: nothing before it matters, so begin with it")
    difference = first_difference(
        earlier.header.layout, later.header.layout, here=str(earlier.path), there=str(later.path)
    )
    if difference:
        raise DeltaError(f"{earlier.path} and {later.path} are for different models: {difference}")
    if a.result_digest != b.base.digest:
        raise DeltaError(
            f"{later.path} does not follow on {earlier.path}: it applies to {b.base.digest}, which ends in {a.result_digest}"
        )
    if (a.run, a.epoch) != (b.run, b.epoch):
        raise DeltaError(
            f"{later.path} is of run {b.run!r}, epoch {b.epoch}, and {earlier.path} of run {a.run!r}, epoch {a.epoch}"
        )


def _labels(first: DeltaFile, last: DeltaFile) -> Labels:
    base, end = first.header.manifest.base, last.header.manifest
    begin, version = base.version if base else None, end.version
    if begin is not None and version <= begin:
        raise UsageError(
            f"{first.path} begins at version {begin} and {last.path} ends at version {version}: "
            "make them with --base-version and --version that grow"
        )
    return Labels(end.run, end.epoch, version, begin, end.learner_step, end.fork_version, end.published_ms)


def _encode_anew(
    before: State | None, deltas: Sequence[DeltaFile], out: Path, labels: Labels, threads: int
) -> WrittenDelta:
    state = after(deltas, before if before is not None else AbsentState(deltas[0].header.layout))
    result = deltas[-1].header.manifest.result_digest
    return write_delta(out, before, state, labels, threads=threads, expected_result=result)


def _concatenate(deltas: Sequence[DeltaFile], out: Path, labels: Labels) -> WrittenDelta:
    layout = deltas[0].header.layout
    base, result = deltas[0].header.manifest.base, deltas[-1].header.manifest.result_digest
    changed = tuple(sum(counts) for counts in zip(*(delta.header.changed for delta in deltas), strict=True))
    stages = tuple(size for delta in deltas for size in delta.header.stages if size) or (0,)
    with DeltaWriter(out) as writer:
        for delta in deltas:
            writer.add(delta.chunk(number) for number in range(len(delta.header.manifest.chunks)))
        manifest = make_manifest(
            labels, layout, (base.digest if base else None, result), tuple(writer.chunks), sum(changed)
        )
        header = DeltaHeader(manifest, layout, changed, stages)
        return WrittenDelta(header, writer.finish(header))
