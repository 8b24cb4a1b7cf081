"""The memory of a node's mirror: an image of the checkpoint, and a control page that says what is in it.

Invariant: both are anonymous (memfd) and go with the last process that holds them, however it ends. The image begins with
the checkpoint at its layout's offsets; behind it lies the change log (`change_log.py`). `state` alone says whether what
the header says of the image counts: it changes while the state is not VALID, and the state is written last. Memory that
another process offers is taken only if it is of this run and layout and of this format. Held by
tests/unit/producers/test_node_mirror.py.
"""

from __future__ import annotations

import enum
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.producers.mirror_lock import close_in_children
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion

MAGIC = b"ABNODE2"
PAGE = 4096
LOG_SLOTS = 64
LOG_SLACK = 4 * 2**20  # for tables beside the bits, and for models so small that a share of the image is nothing


class MirrorState(enum.IntEnum):
    EMPTY = 0  # of no version
    VALID = 1  # holds `policy`, whose digest is `digest`
    APPLYING = 2  # some of record `target_seq` of the log is written: write it again
    REBUILDING = 3  # a snapshot is being decoded in place: of no version


_POLICY: list[tuple[str, str]] = [
    ("epoch", "<u8"),
    ("version", "<u8"),
    ("digest", "S32"),
    ("seq", "<u8"),
    ("published_ms", "<u8"),
    ("path_bytes", "<u8"),
    ("path", "S400"),
]
_FAILURE: list[tuple[str, str]] = [  # of the last attempt to advance it: `turn_failures.py`
    ("number", "<u8"),
    ("seq", "<u8"),
    ("not_before_s", "<f8"),
    ("times", "<u4"),
    ("order", "<u4"),
    ("process", "<u4"),
    ("text", "S400"),
]
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout_hash", "S32"),
        ("run", "S100"),
        ("image_device", "<u8"),
        ("image_inode", "<u8"),
        ("state", "<u4"),
        ("progress", "<u4"),  # counts up while somebody works, so that the others see that they do
        ("goal_epoch", "<u8"),
        ("goal_version", "<u8"),
        ("now", _POLICY),
        ("target", _POLICY),
        ("failure", _FAILURE),
        ("slots", [("seq", "<u8"), ("offset", "<u8"), ("size", "<u8")], LOG_SLOTS),
    ]
)
assert HEADER.itemsize <= PAGE


@dataclass(frozen=True, slots=True)
class Content:
    """What a mirror holds. `seq` counts its advances; `path` and `path_bytes` say how it came to be."""

    policy: PolicyVersion
    digest: str
    seq: int
    published_ms: int
    path: tuple[str, ...]
    path_bytes: int


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


class MirrorMemory:
    """Descriptors and views. `header` has one element of `HEADER`; `sums` uint64 [tensors, 2]; `log` uint8."""

    def __init__(self, layout: Layout, control: int, image: int) -> None:
        """Takes over the two descriptors."""
        self.descriptors = control, image
        close_in_children(self)  # one that outlives us would keep the memory, unlisted
        sums_bytes = 16 * len(layout.tensors)
        flat = np.frombuffer(mmap.mmap(control, _control_bytes(layout)), np.uint8)
        self.header: Any = flat[: HEADER.itemsize].view(HEADER)
        self.sums: NDArray[np.uint64] = flat[PAGE : PAGE + sums_bytes].view(np.uint64).reshape(-1, 2)
        self._map = mmap.mmap(image, _image_bytes(layout))
        whole = np.frombuffer(self._map, np.uint8)
        self._log_at = _pages(layout.mirror_bytes)
        self.image = whole[: layout.mirror_bytes]
        self.log = whole[self._log_at :]

    @classmethod
    def make(cls, layout: Layout, run: str) -> MirrorMemory:
        """Zero-filled, EMPTY."""
        control = os.memfd_create("anabranch-control", os.MFD_CLOEXEC)
        os.ftruncate(control, _control_bytes(layout))
        image = os.memfd_create("anabranch-image", os.MFD_CLOEXEC)
        os.ftruncate(image, _image_bytes(layout))  # pages that nobody writes take no memory
        memory = cls(layout, control, image)
        header, found = memory.header, os.fstat(image)
        header["layout_hash"], header["run"] = layout.hash.encode(), run.encode()
        header["image_device"], header["image_inode"] = found.st_dev, found.st_ino
        header["magic"] = MAGIC
        return memory

    @classmethod
    def adopt(cls, layout: Layout, run: str, control_path: str, image_path: str) -> MirrorMemory | None:
        """The memory at two paths in /proc/PID/fd; None if they lead to anything else. Raises OSError."""
        if not os.readlink(control_path).startswith("/memfd:anabranch-control"):
            return None
        if not os.readlink(image_path).startswith("/memfd:anabranch-image"):
            return None
        control = os.open(control_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            image = os.open(image_path, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(control)
            raise
        sizes = os.fstat(control).st_size, os.fstat(image).st_size
        if sizes == (_control_bytes(layout), _image_bytes(layout)):
            raw: Any = np.frombuffer(os.pread(control, HEADER.itemsize, 0), HEADER)
            found = os.fstat(image)
            said = raw["magic"][0], raw["layout_hash"][0], raw["run"][0], raw["image_device"][0], raw["image_inode"][0]
            if said == (MAGIC, layout.hash.encode(), run.encode(), found.st_dev, found.st_ino):
                return cls(layout, control, image)
        os.close(control)
        os.close(image)
        return None

    @property
    def state(self) -> MirrorState:
        return MirrorState(int(self.header["state"][0]))

    @state.setter
    def state(self, state: MirrorState) -> None:
        self.header["state"][0] = state

    def content(self) -> Content:
        """What the header says; it counts in state VALID only."""
        now = self.header["now"][0]
        path = now["path"].decode(errors="replace")
        return Content(
            PolicyVersion(int(now["epoch"]), int(now["version"])),
            now["digest"].decode(errors="replace"),
            int(now["seq"]),
            int(now["published_ms"]),
            tuple(path.split(", ")) if path else (),
            int(now["path_bytes"]),
        )

    def set_target(self, manifest: Manifest, seq: int, path: Sequence[str], path_bytes: int) -> None:
        """What it is going to hold."""
        target = self.header["target"][0]
        target["epoch"], target["version"], target["seq"] = manifest.epoch, manifest.version, seq
        target["digest"], target["published_ms"] = manifest.result_digest.encode(), manifest.published_ms
        shown = [*path[:5], f"... {len(path) - 10} more", *path[-5:]] if len(path) > 10 else path
        target["path"], target["path_bytes"] = ", ".join(shown).encode(), path_bytes

    def settle(self) -> None:
        """It holds the target. The state comes last."""
        self.header["now"][0] = self.header["target"][0]
        self.state = MirrorState.VALID

    def free_log(self, offset: int, size_bytes: int) -> None:
        """Give the memory of a range of the log (whole pages) back; it reads as zeros then."""
        if size_bytes:
            self._map.madvise(mmap.MADV_REMOVE, self._log_at + offset, size_bytes)

    def close(self) -> None:
        """Give up the descriptors. Views stay valid."""
        control, image = self.descriptors
        if control >= 0:
            os.close(control)
            os.close(image)
            self.descriptors = -1, -1

    def __del__(self) -> None:
        if hasattr(self, "descriptors"):
            self.close()


def _control_bytes(layout: Layout) -> int:
    """Header and sums."""
    return PAGE + max(1, 16 * len(layout.tensors))


def _image_bytes(layout: Layout) -> int:
    """Image and log. The log is sparse: twice the image leaves room for any one change beside what is kept of others."""
    image = _pages(layout.mirror_bytes)
    return image + 2 * (image + LOG_SLACK)
