"""Which files under RUN_DIRECTORY/trajectories count: the one function that every reader of recorded trajectories asks.

    trajectories/run=NAME/epoch=E/day=YYYY-MM-DD/region=REGION/FIRSTID_LASTID.parquet
    trajectories/run=NAME/epoch=E/day=YYYY-MM-DD/region=REGION/FIRSTID_LASTID.merged.parquet
    trajectories/region=REGION/FIRSTID_LASTID.parquet      (a recorder before partitions; its rows have a column `run`)

Invariant: the rows of the files that count are those that were recorded, each once, at every moment, also after a kill -9
of the recorder between any two acts of it. A file counts unless its range of entry ids lies inside that of a merged one of the same
partition, which was made of it: then it is about to be removed. Held by tests/unit/consumers/test_recorded_files.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

TRAJECTORIES_DIRECTORY = "trajectories"  # of a run directory
SUFFIX = ".parquet"
MERGED = ".merged"
_NAME = re.compile(r"(\d+(?:-\d+)?)_(\d+(?:-\d+)?)(\.merged)?\.parquet\Z")
_KEYS = ("run", "epoch", "day", "region")


def id_key(entry_id: str) -> tuple[int, int]:
    """Redis stream ids ("milliseconds-sequence") in stream order."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


@dataclass(frozen=True, slots=True)
class Partition:
    """What all rows of a file have in common. `run`, `epoch` (of the newest policy that sampled a token of the row's group) and
    `day` (UTC, of the entry id's milliseconds) are None in a file of the old layout."""

    run: str | None
    epoch: int | None
    day: str | None
    region: str

    @property
    def folder(self) -> str:
        """Below the root, names percent-encoded as Hive and Arrow (`segment_encoding="uri"`) do."""
        values = (self.run, self.epoch, self.day, self.region)
        return "/".join(
            f"{key}={quote(str(value), safe='')}" for key, value in zip(_KEYS, values, strict=True) if value is not None
        )


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """`first_id`, `last_id`: range of the entry ids in it, both included; it need not hold all that lie between. `path` is
    relative where names alone were looked at."""

    path: Path
    partition: Partition
    first_id: str
    last_id: str
    merged: bool = False

    @property
    def first(self) -> tuple[int, int]:
        return id_key(self.first_id)

    @property
    def last(self) -> tuple[int, int]:
        return id_key(self.last_id)


def parse_name(relative: str) -> RecordedFile | None:
    """What a path below the root names, None if it is no recorded file's (half-written ones are not)."""
    *folders, name = relative.split("/")
    match = _NAME.match(name)
    values = dict(folder.partition("=")[::2] for folder in folders)
    if match is None or tuple(values) not in (_KEYS, _KEYS[-1:]) or len(values) != len(folders):
        return None
    epoch = values.get("epoch")
    if epoch is not None and not re.match(r"\d{1,9}\Z", epoch):
        return None
    run, day = values.get("run"), values.get("day")
    partition = Partition(
        None if run is None else unquote(run), None if epoch is None else int(epoch), day, unquote(values["region"])
    )
    return RecordedFile(Path(relative), partition, match[1], match[2], match[3] is not None)


def split(files: Iterable[RecordedFile]) -> tuple[list[RecordedFile], list[RecordedFile]]:
    """Those that count, oldest first; and those that do not, since another holds their rows."""
    counted: list[RecordedFile] = []
    covered: list[RecordedFile] = []
    reaches: dict[Partition, tuple[int, int]] = {}  # the highest last id of a merged one: whoever has it began no later
    for file in sorted(files, key=lambda f: (f.first, [-n for n in f.last], not f.merged, f.partition.folder)):
        reach = reaches.get(file.partition)
        if reach is not None and file.last <= reach:
            covered.append(file)
            continue
        counted.append(file)
        if file.merged:
            reaches[file.partition] = max(file.last, reach or file.last)
    return counted, covered


def files_that_count(names: Iterable[str]) -> list[RecordedFile]:
    """Of paths relative to the root (of an object store, say), oldest first."""
    return split(file for name in names if (file := parse_name(name)) is not None)[0]


def all_files(root: Path) -> list[RecordedFile]:
    """Every file under a final name, those that do not count included. Raises OSError."""
    found = (parse_name(name) for name in _names(root, ""))
    return [replace(f, path=root / f.path) for f in found if f is not None]


def recorded_files(root: Path) -> list[RecordedFile]:
    """The files below `root` (RUN_DIRECTORY/trajectories) that count, oldest first; empty if there is no such folder.

    What is listed may be rewritten in place at any time (with the same rows), and be gone some time after it was
    merged into another, or at once when it is dropped for want of space: a reader that does not find a file lists again. Raises OSError.
    """
    return split(all_files(root))[0]


def _names(root: Path, below: str) -> Iterator[str]:
    try:
        with os.scandir(root / below) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries]
    except FileNotFoundError:  # dropped meanwhile
        return
    for name, is_folder in found:
        if not is_folder:
            yield f"{below}{name}"
        elif name.partition("=")[0] in _KEYS and below.count("/") < len(_KEYS):
            yield from _names(root, f"{below}{name}/")
