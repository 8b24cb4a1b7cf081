"""Appends a line to versions.jsonl for every manifest that was committed.

Invariant: each manifest has one line at most, after its commit; a line that a crash or a full disk cut is ended before the
next, and what it was to tell is told anew at the next start if the channel still has it. Neither a file that cannot be written
nor a manifest of an earlier start that cannot be read fails a publication. Held by tests/unit/learner/test_version_lines.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from anabranch.consumers.version_files import read_versions
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.version_record import VersionRecord
from anabranch.transport.weight_channel import Named, WeightChannel

AT_ONCE = 64  # manifests asked for in one call


class VersionLines:
    """For several threads. Its file is opened for each line: some per step at most."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: set[tuple[int, int, str]] | None = None  # None until the file is read
        self._failed = False
        self._log = structlog.get_logger()

    def append(self, manifest: Manifest, *, commit_s: float | None = None) -> None:
        """`commit_s`: from the copy of the weights to the commit, for what a step waits for."""
        record = VersionRecord.of(manifest, commit_s=commit_s)
        with self._lock:
            try:
                if record.name not in self._names():
                    self._write(record.line())
                    self._names().add(record.name)
                self._failed = False
            except OSError as error:
                if not self._failed:  # told once: every version would say so
                    self._log.warning("versions are not told of", file=str(self._path), error=str(error))
                self._failed = True

    def catch_up(self, channel: WeightChannel) -> None:
        """Append what the channel has and the file has not, oldest first. Raises StreamUnavailableError."""
        try:
            with self._lock:
                known = set(self._names())
        except OSError:  # told when there is something to append
            return
        there = [(entry.policy, entry.label) for entry in channel.index()]
        missing = [(p, label) for p, label in there if (p.epoch, p.version, label) not in known]
        for at in range(0, len(missing), AT_ONCE):
            for manifest in self._readable(channel, missing[at : at + AT_ONCE]):
                self.append(manifest)

    def _readable(self, channel: WeightChannel, names: Sequence[Named]) -> list[Manifest]:
        """Those of `names` that are there and can be read: one that is damaged spoils the answer for all."""
        try:
            return [manifest for manifest in channel.manifests(names) if manifest is not None]
        except ManifestError as error:
            if len(names) > 1:
                return [manifest for name in names for manifest in self._readable(channel, [name])]
            policy, label = names[0]
            self._log.warning("a version is not told of", manifest=f"{label} {policy}", error=str(error))
            return []

    def _names(self) -> set[tuple[int, int, str]]:
        if self._known is None:
            self._known = {record.name for record in read_versions(self._path.parent)}
        return self._known

    def _write(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(fd, line) != len(line):
                raise OSError(f"only a part of a line fitted into {self._path}")
        finally:
            os.close(fd)
