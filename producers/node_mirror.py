"""The mirror of a node: one image of the checkpoint for all producers of a run, advanced by whoever has the turn.

Invariant: in state VALID the image holds the version that the header names, with that digest. An update is checked before
a byte is written: its base is what the image holds, every index lies inside its tensor, and the digest that will result is
the manifest's. It is then written into the change log, and from there into the image; a process that dies in between
leaves the state APPLYING, and the next one with the turn writes the same record again. A snapshot is decoded in place;
dying in it leaves an image of no version, which only another snapshot fills. Held by tests/unit/producers/test_node_mirror.py
and tests/process/test_weight_kills.py.

Two locks: the *turn*, held by the one process that fetches; and the image's, exclusive to write, shared to read from it.
The kernel drops both when a process dies. Sums of digests (`kernels/digest.py`) are kept per tensor, so that an update costs
what it changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from anabranch.kernels.delta_codec import TensorChange, check_disjoint, decode_anchor
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.digest import Sums
from anabranch.kernels.workers import Workers
from anabranch.producers.change_log import Changed, ChangeLog
from anabranch.producers.mirror import check_change, places, tensor_bits
from anabranch.producers.mirror_lock import FileLock
from anabranch.producers.mirror_memory import LOG_SLACK, Content, MirrorMemory, MirrorState
from anabranch.producers.mirror_registry import NotShared, default_node_dir, find_or_make
from anabranch.producers.mirror_sums import MirrorSums
from anabranch.producers.turn_failures import TurnFailures
from anabranch.schemas.errors import DeadlineError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion

IMAGE_DEADLINE_S = 20.0  # a reader holds the image for the time of one swap
LOG_SHARE = 4  # the change log keeps as much as 1 / LOG_SHARE of the image


class NodeMirror:
    """One process's handle. Two threads may use it: the follower's (everything but `hold` and `let_go`) and the engine's
    (`hold`, `let_go`, and reading while it holds)."""

    def __init__(self, layout: Layout, memory: MirrorMemory, *, codec_threads: int = 1, alone: str = "") -> None:
        """Use `open_node_mirror`. `alone`: why it is not shared, "" if it is."""
        self.layout, self.alone, self._memory = layout, alone, memory
        self.workers, self.failures = Workers(codec_threads), TurnFailures(memory)
        self._header = memory.header
        self._log = ChangeLog(memory, layout, budget_bytes=max(LOG_SLACK, layout.mirror_bytes // LOG_SHARE))
        control, image = (f"/proc/self/fd/{fd}" for fd in memory.descriptors)
        self._turn = FileLock(control, "the turn to fetch weights for this node")
        self._writing = FileLock(image, "the node's copy of the weights")
        self._reading = FileLock(image, "the node's copy of the weights")
        self._bits: dict[str, Bits] = {spec.name: tensor_bits(memory.image, spec) for spec in layout.tensors}
        self._sums = MirrorSums(layout, memory, self._bits, self.workers)

    # What it holds

    @property
    def image(self) -> NDArray[np.uint8]:
        return self._memory.image

    @property
    def path(self) -> str:
        """Where another process of the same user can map the image while this one holds it (`mirror.map_shared`)."""
        return f"/proc/{os.getpid()}/fd/{self._memory.descriptors[1]}"

    @property
    def state(self) -> MirrorState:
        return self._memory.state

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever somebody gets on with advancing the mirror."""
        return int(self._header["now"]["seq"][0]), int(self._header["progress"][0])

    @property
    def goal(self) -> PolicyVersion:
        """Where whoever has, or last had, the turn takes it."""
        return PolicyVersion(int(self._header["goal_epoch"][0]), int(self._header["goal_version"][0]))

    @property
    def bits(self) -> Mapping[str, Bits]:
        """Every tensor's flat bits. Read them with the turn, or between `hold` and `let_go`."""
        return self._bits

    def tensor_bits(self, name: str) -> NDArray[Any]:
        try:
            return self._bits[name]
        except KeyError:
            raise ModelMismatchError(f"the layout has no tensor {name!r}") from None

    def content(self) -> Content | None:
        """What is in it now; None while it holds no version, or is being written."""
        for _ in range(3):
            seq = int(self._header["now"]["seq"][0])
            if self._memory.state is not MirrorState.VALID:
                return None
            content = self._memory.content()
            if self._memory.state is MirrorState.VALID and int(self._header["now"]["seq"][0]) == seq == content.seq:
                return content
        return None

    # The turn

    def try_turn(self) -> bool:
        """Become the one who advances it; False if another process is that."""
        return self._turn.try_lock()

    def end_turn(self) -> None:
        self._turn.unlock()

    def turn_holder(self) -> str:
        return self._turn.holder()

    def set_goal(self, goal: PolicyVersion) -> None:
        self._header["goal_epoch"][0], self._header["goal_version"][0] = goal.epoch, goal.version

    def note_progress(self) -> None:
        self._header["progress"][0] += 1

    def recover(self) -> None:
        """With the turn: finish what a process that died left half-written. Raises DeadlineError as `advance`."""
        if self.state in (MirrorState.EMPTY, MirrorState.VALID):
            return
        with self._writing.held(deadline_s=IMAGE_DEADLINE_S):
            changes = (
                self._log.read(int(self._header["target"]["seq"][0])) if self.state is MirrorState.APPLYING else None
            )
            if changes is not None:
                self._scatter(changes)
                self._sums.store(self._sums.recomputed())
                if self._sums.digest({}).encode() == self._header["target"]["digest"][0]:
                    self._memory.settle()
                    structlog.get_logger().info(
                        "finished an update of a process that died", policy=str(self._memory.content().policy)
                    )
                    return
            self._empty()

    def distrust(self) -> bool:
        """With the turn, after an update that did not fit: is the image what the header says? If not (memory that failed,
        a stray write), it is of no version from now on, and True is returned. Raises DeadlineError as `advance`."""
        content = self.content()
        if content is None or self.digest() == content.digest:
            return False
        with self._writing.held(deadline_s=IMAGE_DEADLINE_S):
            self._empty()
        return True

    def advance(
        self, manifest: Manifest, changes: Sequence[TensorChange], *, path: Sequence[str], path_bytes: int
    ) -> None:
        """With the turn: from what it holds to `manifest`, by `changes` decoded over it (none for a fork).

        Raises:
            DeltaError: another base, a change that does not fit, or another digest would result. Nothing is written then.
            ModelMismatchError: a tensor that the layout lacks; nothing is written.
            DeadlineError: a reader does not let go of the image; nothing is written.
        """
        content = self.content()
        if content is None or manifest.base is None or manifest.base.digest != content.digest:
            has = "no version" if content is None else f"{content.policy} with digest {content.digest}"
            raise DeltaError(f"weights {manifest.policy} go on from {manifest.base}, but this node holds {has}")
        for change in changes:
            check_change(self.tensor_bits(change.name), change)
        sums = self._sums.after(changes)
        digest = self._sums.digest(sums)
        if digest != manifest.result_digest:
            raise DeltaError(
                f"weights {manifest.policy}: digest {digest} would result, the manifest says {manifest.result_digest}"
            )
        self._write(manifest, changes, sums, content.seq + 1, path, path_bytes)

    def rename(self, manifest: Manifest, *, path: Sequence[str]) -> None:
        """With the turn: what it holds is `manifest`'s state already. Raises DeltaError if it is not, DeadlineError."""
        content = self.content()
        if content is None or content.digest != manifest.result_digest:
            raise DeltaError(
                f"weights {manifest.policy} have digest {manifest.result_digest}, this node holds another state"
            )
        self._write(manifest, (), {}, content.seq + 1, path, 0)

    def rebuild(self, manifest: Manifest, chunks: Sequence[bytes], *, path: Sequence[str], path_bytes: int) -> None:
        """With the turn: decode a snapshot in place, whatever it held before.

        Raises:
            DeltaError: heads of chunks do not fit (nothing is written); a body does not, or another digest results: it
                is of no version then.
            DeadlineError: as `advance`.
        """
        heads = check_disjoint(self.layout, chunks)
        elements, whole = sum(h.elements for h in heads), sum(t.numel for t in self.layout.tensors)
        if elements != whole:
            raise DeltaError(f"weights {manifest.policy}: the snapshot's chunks cover {elements} of {whole} elements")
        with self._writing.held(deadline_s=IMAGE_DEADLINE_S):
            self._memory.set_target(manifest, int(self._header["now"]["seq"][0]) + 1, path, path_bytes)
            self._memory.state = MirrorState.REBUILDING
            try:
                self._log.clear()
                decode_anchor(self.layout, chunks, self._bits, self.workers)
                self._sums.store(self._sums.recomputed())
                digest = self._sums.digest({})
                if digest != manifest.result_digest:
                    raise DeltaError(
                        f"weights {manifest.policy}: digest {digest}, the manifest says {manifest.result_digest}"
                    )
            except BaseException:
                self._empty()
                raise
            self._memory.settle()

    # Reading

    def hold(self) -> bool:
        """The engine's thread: keep it from being written until `let_go`. False if it is being written."""
        return self._reading.try_lock(shared=True)

    def let_go(self) -> None:
        self._reading.unlock()

    @contextmanager
    def kept_still(self, *, deadline_s: float = IMAGE_DEADLINE_S) -> Iterator[None]:
        """The follower's thread: as `hold`. Raises DeadlineError."""
        with self._writing.held(shared=True, deadline_s=deadline_s):
            yield

    def changed_since(self, seq: int, now: int) -> Changed:
        """What advances after number `seq` up to `now` have touched; every tensor, whole, if that is not known any more.
        While it is held."""
        changed = self._log.changed_since(seq, now) if 0 < seq <= now else None
        return dict.fromkeys(self.layout.by_name) if changed is None else changed

    def digest(self) -> str:
        """Root digest, recomputed from the image in full. While it is held."""
        return self._sums.digest(self._sums.recomputed())

    def close(self) -> None:
        """Give it up; it goes with the last process that has not. Idempotent."""
        for lock in (self._turn, self._writing, self._reading):
            lock.close()
        self.workers.close()
        self._memory.close()

    # Inside

    def _write(
        self,
        manifest: Manifest,
        changes: Sequence[TensorChange],
        sums: Mapping[int, Sums],
        seq: int,
        path: Sequence[str],
        path_bytes: int,
    ) -> None:
        with self._writing.held(deadline_s=IMAGE_DEADLINE_S):
            logged = self._log.append(seq, changes)
            self._memory.set_target(manifest, seq, path, path_bytes)
            self._memory.state = MirrorState.APPLYING if logged else MirrorState.REBUILDING
            self._scatter(changes)
            for change in changes:
                if not np.array_equal(self._bits[change.name][places(change)], change.bits):
                    self._empty()
                    raise DeltaError(f"weights {manifest.policy}: {change.name} does not hold what was written to it")
            self._sums.store(sums)
            self._memory.settle()
            self._log.trim()

    def _empty(self) -> None:
        self._memory.state = MirrorState.REBUILDING  # until the log is clear, which nobody may read then
        self._log.clear()
        self._memory.state = MirrorState.EMPTY

    def _scatter(self, changes: Sequence[TensorChange]) -> None:
        for change in changes:
            self._bits[change.name][places(change)] = change.bits


def open_node_mirror(layout: Layout, *, run: str, node_dir: Path | None = None, codec_threads: int = 1) -> NodeMirror:
    """The mirror that the producers of this node, user, run and layout share, or, where they cannot, one of its own."""
    name = f"{run}.{layout.hash[:16]}"
    try:
        memory, _ = find_or_make(
            node_dir or default_node_dir(),
            name,
            lambda control, image: MirrorMemory.adopt(layout, run, control, image),
            lambda: MirrorMemory.make(layout, run),
        )
        return NodeMirror(layout, memory, codec_threads=codec_threads)
    except (NotShared, DeadlineError, OSError) as error:
        structlog.get_logger().warning("this producer keeps a copy of the weights of its own", reason=str(error))
        return NodeMirror(layout, MirrorMemory.make(layout, run), codec_threads=codec_threads, alone=str(error))
