"""Recent states of a rank's share, without a copy of each: the newest as an image, earlier ones by undo records.

Invariant: `at(v)` reads exactly the bits that version v had, for every v of `versions`: the image with the undo records
from the head back to v. A version stays for as long as a skip delta can still begin there (v − 2^k for aligned k), or
something is pinned to it; when one goes, the records on either side of it become one, in which the earlier bits win. So
there are about `levels` records, as in a binary counter. Above `memory_bytes` the oldest versions are given up, and with
them the longest skips. Held by tests/property/test_version_history.py.

One thread changes it. Any thread may read; what `at` gives for the newest version may be a view, good until `advance`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.delta_plan import Source
from anabranch.kernels.delta_sparse import Part
from anabranch.kernels.digest import Sums, subtract_sums, sums_at, tensor_sums
from anabranch.kernels.undo import Indices, marked, merge_undo, put_bits, take_bits
from anabranch.learner.shares import ShareImage
from anabranch.schemas.errors import AnabranchError

Job = tuple[Piece, ...]
_INDEX_BYTES = 4


class VersionGoneError(AnabranchError):
    """A version that was asked for is not kept (any more)."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a version changes of `piece`, `count` elements: at `indices` (uint32 [k] from its start, ascending) the bits [k]
    before and after; where those would take as much memory as the piece, `indices` is None and the bits are all of it:
    those of the part, not copies."""

    piece: Piece
    indices: Indices | None
    old: Bits
    new: Bits
    count: int

    @classmethod
    def of(cls, part: Part) -> Change:
        if part.changed * (_INDEX_BYTES + part.old.itemsize) >= part.old.nbytes:
            return cls(part.piece, None, part.old, part.new, part.changed)
        indices = marked(part.words, part.changed)
        return cls(part.piece, indices, take_bits(part.old, indices), take_bits(part.new, indices), part.changed)

    def sums(self) -> Sums:
        """By how much those of the tensor grow."""
        if self.indices is None:
            old, new = tensor_sums(self.old, self.piece.start), tensor_sums(self.new, self.piece.start)
        else:
            at = self.indices.astype(np.int64) + self.piece.start
            old, new = sums_at(at, self.old), sums_at(at, self.new)
        return subtract_sums(new, old)


@dataclass(slots=True)
class _Undo:
    """Leads back to version `since`: old `bits` at `indices`, or of the whole piece where `indices` is None."""

    since: int
    indices: Indices | None
    bits: Bits

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def apply(self, bits: Bits) -> None:
        if self.indices is None:
            np.copyto(bits, self.bits)
        else:
            put_bits(bits, self.indices, self.bits)


@dataclass(slots=True)
class _Unit:
    """One piece of a job: its part of the image, and its records, oldest first."""

    piece: Piece
    image: Bits
    undo: list[_Undo] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def state(self, version: int) -> Bits:
        bits = self.image.copy()
        for record in reversed(self.undo):
            if record.since < version:
                break
            record.apply(bits)
        return bits


class VersionHistory:
    """Args:
    image: the share at `version`; it is the history's from now on.
    jobs: how the share is encoded; readers read pieces of these.
    levels: a version is kept until no skip of up to 2^levels versions can begin there.
    memory_bytes: at most so much for undo records.
    """

    def __init__(self, image: ShareImage, jobs: Sequence[Job], version: int, *, levels: int, memory_bytes: int) -> None:
        self._image, self._levels, self._memory_bytes = image, levels, memory_bytes
        self._jobs = [[_Unit(piece, image.bits(piece)) for piece in job] for job in jobs]
        self._units = {unit.piece: unit for job in self._jobs for unit in job}
        self._names = {t.name: i for i, t in enumerate(image.layout.tensors)}
        self.head = version
        self._kept: list[int] = []  # versions before the head, ascending
        self._pins: Counter[int] = Counter()
        self._merging: tuple[int, int] | None = None  # the version that goes, and the next job to do
        self.nbytes = 0
        self._told = False

    def versions(self) -> list[int]:
        """Those that `at` reads, ascending."""
        going = self._merging[0] if self._merging else None
        return [*(v for v in self._kept if v != going), self.head]

    def at(self, version: int) -> Source:
        """Reads pieces of the jobs, or parts of them, as of `version`. Its `read` raises VersionGoneError if that is not
        kept (any more)."""
        return _Version(self, version)

    def pin(self, version: int) -> None:
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]

    def advance(self, version: int, changes: Iterable[Change]) -> None:
        """The image becomes `version`, the one after the head, by `changes`: each of one piece of a job."""
        for change in changes:
            unit = self._units[change.piece]
            with unit.lock:
                if change.indices is None:
                    undo = _Undo(self.head, None, unit.image.copy())
                    np.copyto(unit.image, change.new)
                else:
                    undo = _Undo(self.head, change.indices, change.old)
                    put_bits(unit.image, change.indices, change.new)
                unit.undo.append(undo)
            self.nbytes += undo.nbytes
        self._kept.append(self.head)
        self.head = version
        while self.nbytes > self._memory_bytes and self._kept:
            self._forget_oldest()

    def tidy(self) -> bool:
        """Merge the records of one job around one version that nothing needs; False if there is nothing to do."""
        if self._merging is None:
            gone = next((v for v in self._kept if not self._is_needed(v)), None)
            if gone is None:
                return False
            self._merging = gone, 0
        version, job = self._merging
        before = max((v for v in self._kept if v < version), default=None)
        for unit in self._jobs[job] if self._jobs else ():
            with unit.lock:
                self.nbytes += _leave_out(unit, version, before)
        if job + 1 < len(self._jobs):
            self._merging = version, job + 1
        else:
            self._merging = None
            self._kept.remove(version)
        return True

    def _is_needed(self, version: int) -> bool:
        """A skip of 2^k versions can begin at a version that 2^k divides, as long as its end is still to come."""
        if self._pins[version] > 0:
            return True
        aligned = (version & -version).bit_length() - 1 if version else self._levels
        return self._levels > 0 and aligned > 0 and self.head - version < 1 << min(aligned, self._levels)

    def _forget_oldest(self) -> None:
        oldest = self._kept.pop(0)
        if self._merging is not None and self._merging[0] == oldest:
            self._merging = None
        for unit in self._units.values():
            with unit.lock:
                while unit.undo and unit.undo[0].since <= oldest:
                    self.nbytes -= unit.undo.pop(0).nbytes
        if not self._told:
            self._told = True
            structlog.get_logger().warning(
                "channel.skip_memory_bytes is used up; longer skip deltas are left out",
                versions=self.head - oldest,
                skip_memory_bytes=self._memory_bytes,
            )

    def _read(self, version: int, name: str, start: int, stop: int) -> Bits:
        tensor = self._names[name]
        parts = []
        for unit in self._overlapping(tensor, start, stop):
            first, last = max(start, unit.piece.start), min(stop, unit.piece.stop)
            with unit.lock:
                bits = unit.image if version == self.head else unit.state(version)
            if version not in self.versions():
                raise VersionGoneError(f"version {version} of this share is not kept any more")
            parts.append(bits[first - unit.piece.start : last - unit.piece.start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _overlapping(self, tensor: int, start: int, stop: int) -> list[_Unit]:
        exact = self._units.get(Piece(tensor, start, stop))
        if exact is not None:
            return [exact]
        return [
            u
            for u in self._units.values()
            if u.piece.tensor == tensor and u.piece.start < stop and start < u.piece.stop
        ]


class _Version:
    """A `Source` of one version."""

    def __init__(self, history: VersionHistory, version: int) -> None:
        self._history, self._version = history, version

    def read(self, name: str, start: int, stop: int) -> Bits:
        return self._history._read(self._version, name, start, stop)


def _leave_out(unit: _Unit, version: int, before: int | None) -> int:
    """Make the records of `unit` such that none leads to `version`; returns by how many bytes they grew."""
    at = next((i for i, record in enumerate(unit.undo) if record.since == version), None)
    if at is None:
        return 0  # the version after it changed nothing here
    later = unit.undo[at]
    if before is None:
        del unit.undo[: at + 1]
        return -later.nbytes
    earlier = unit.undo[at - 1] if at and unit.undo[at - 1].since >= before else None
    if earlier is None:
        later.since = before
        return 0
    merged = _merge(unit, earlier, later)
    unit.undo[at - 1 : at + 1] = [merged]
    return merged.nbytes - earlier.nbytes - later.nbytes


def _merge(unit: _Unit, earlier: _Undo, later: _Undo) -> _Undo:
    if earlier.indices is None:
        return earlier
    if later.indices is None:
        bits = later.bits.copy()
        put_bits(bits, earlier.indices, earlier.bits)
        return _Undo(earlier.since, None, bits)
    merged = _Undo(earlier.since, *merge_undo((earlier.indices, earlier.bits), (later.indices, later.bits)))
    return merged if merged.nbytes < unit.image.nbytes else _Undo(earlier.since, None, unit.state(earlier.since))
