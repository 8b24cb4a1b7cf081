"""Makes few large files of many small ones, so that a reader opens few.

Invariant: at every moment the files that count (`recorded_files.split`) hold the same rows, each once: the merged file is complete before its
parts stop to count, which its name decides; they are removed later, for the readers that have listed them. Only settled files of one
partition are merged, and none lies between them that is left out. Held by tests/unit/consumers/test_merging.py and
tests/property/test_keeping.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.recorded_files import MERGED, SUFFIX, RecordedFile

AT_LEAST = 8  # fewer files are not worth the rewriting


@dataclass(frozen=True, slots=True)
class Weighed:
    """A file that counts. `settled`: see `run_files`."""

    file: RecordedFile
    bytes: int
    settled: bool


def to_merge(files: Sequence[Weighed], *, target_bytes: int, at_least: int = AT_LEAST) -> list[RecordedFile]:
    """The first run of neighbours worth merging, of at most `target_bytes`; empty if there is none.

    Args:
        files: all that count, of any partitions.
    """
    everything = [one.file for one in files]
    ordered = sorted(files, key=lambda one: (one.file.partition.folder, one.file.first, one.file.last))
    for _, group in groupby(ordered, key=lambda one: one.file.partition.folder):
        for run in _runs(group, target_bytes):
            parts = [one.file for one in _worth(run)]
            if len(parts) >= at_least and still_alone(parts, everything):
                return parts
    return []


def _runs(partition: Iterable[Weighed], target_bytes: int) -> Iterator[list[Weighed]]:
    """Neighbours that may be merged. `partition`: by their first ids."""
    run: list[Weighed] = []
    for one in partition:
        fits = one.settled and one.file.partition.run is not None and 2 * one.bytes <= target_bytes
        apart = not run or one.file.first > max(other.file.last for other in run)
        if fits and apart and sum(other.bytes for other in run) + one.bytes <= target_bytes:
            run.append(one)
        else:
            yield run
            run = [one] if fits and apart else []
    yield run


def _worth(run: list[Weighed]) -> list[Weighed]:
    """Without a file that is larger than all others: into one of less than twice its size it is not written, so that a row is written
    again a number of times that grows with the logarithm of `target_bytes`, not once for every few new files."""
    while run:
        at = max(range(len(run)), key=lambda i: run[i].bytes)
        if 2 * run[at].bytes <= sum(one.bytes for one in run):
            break
        run = max(run[:at], run[at + 1 :], key=len)
    return run


def merge(parts: Sequence[RecordedFile]) -> pa.Table:
    """The rows of `parts`, in the order of their ids. Raises OSError, ArrowException."""
    tables = [pq.read_table(part.path, partitioning=None) for part in parts]
    return pa.concat_tables(tables, promote_options="default")


def merged_path(parts: Sequence[RecordedFile]) -> Path:
    return parts[0].path.with_name(f"{parts[0].first_id}_{parts[-1].last_id}{MERGED}{SUFFIX}")


def still_alone(parts: Sequence[RecordedFile], there: Sequence[RecordedFile]) -> bool:
    """Whether `parts` are all of the files there that a merged one of them would hide."""
    first, last = parts[0], parts[-1]
    hidden = {
        f.path for f in there if f.partition == first.partition and first.first <= f.first and f.last <= last.last
    }
    return hidden == {part.path for part in parts}
