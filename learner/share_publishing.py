"""What a rank's publishing thread does with a snapshot: encode its share, store it, tell rank 0; rank 0 commits.

Invariant: the base of a delta is exactly the state that was handed out last (an image, compared by bits), so lr = 0 gives
an empty delta; the image moves on only when all chunks of the delta are stored. A rank that cannot store its share says
why, as long as the hub hears it, so that rank 0 waits for nobody who has failed. All of it runs in one thread, which owns
the connection. Held by tests/unit/learner/test_weight_publisher.py and tests/unit/learner/test_publisher_failures.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import structlog

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import encode_job
from anabranch.kernels.delta_plan import Source, plan_jobs
from anabranch.kernels.digest import NOTHING, Sums, add_sums, tensor_sums
from anabranch.kernels.workers import Workers
from anabranch.learner.commits import Commits
from anabranch.learner.compactor import Compactor, Outcome
from anabranch.learner.publish_order import AnchorOrder, EpochOpening, PublishOrder
from anabranch.learner.rank_shares import PATIENCE, POLL_S
from anabranch.learner.share_record import DECISION, OPENING, ShareRecord, read_record
from anabranch.learner.shares import ShareImage
from anabranch.learner.uploads import Uploads
from anabranch.learner.version_history import Change, Job, VersionHistory
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.errors import AnabranchError, ConfigError, TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.retry import retry_until, wait_until
from anabranch.transport.signing import Signer
from anabranch.transport.wiring import Hub

UPLOAD_THREADS = 4


class Share(Protocol):
    """A rank's part of the weights: `LiveShare`, or arrays (`ArrayShare`)."""

    layout: Layout
    pieces: tuple[Piece, ...]
    rank: int
    world_size: int

    def image(self, *, pinned: bool = False) -> ShareImage:
        """Room for it; with `pinned` what a GPU copies to fast, if the weights live on one."""
        ...

    def copy_to(self, image: ShareImage) -> None:
        """May be collective."""
        ...


class SharePublishing:
    """Made by `open`; all methods belong to one thread.

    Args:
        on_manifest: rank 0: told of every manifest that is committed.
        progress: called when a part of what was handed over is done.
        stopping: set when nobody waits for the outcome any more.
    """

    def __init__(
        self,
        share: Share,
        hub: Hub,
        config: ChannelSection,
        opening: EpochOpening,
        *,
        signer: Signer | None,
        threads: Workers,
        on_manifest: Callable[[Manifest], object],
        progress: Callable[[], object],
        stopping: threading.Event,
    ) -> None:
        self._share, self._hub, self._config, self._opening = share, hub, config, opening
        self._signer, self._threads, self._progress, self._stopping = signer, threads, progress, stopping
        self._jobs: list[Job] = plan_jobs(share.layout, pieces=share.pieces)
        self._uploads, self._background_uploads = (
            Uploads(hub.channel.blobs, n, deadline_s=config.connect_deadline_s, stopping=stopping, name=name)
            for n, name in ((UPLOAD_THREADS, "upload"), (1, "background upload"))
        )
        self._image = share.image()
        self._untold: deque[ShareRecord] = deque()  # of what was made in the background, for rank 0
        self._commits: Commits | None = None
        if share.rank == 0:
            self._commits = Commits(
                hub.channel,
                share.layout,
                opening,
                world_size=share.world_size,
                reach=2**config.skip_levels,
                deadline_s=config.connect_deadline_s,
                threads=config.codec_threads,
                progress=progress,
                signer=signer,
                on_committed=on_manifest,
                should_stop=stopping.is_set,
            )
        self._history = VersionHistory(
            self._image, self._jobs, opening.fork_version,
            levels=config.skip_levels, memory_bytes=config.skip_memory_bytes,
        )  # fmt: skip
        self._compactor = Compactor(
            share.layout, self._jobs, self._history, self._background_uploads,
            fork_version=opening.fork_version, levels=config.skip_levels, done=self._made_in_background,
        )  # fmt: skip

    def begin(self, snapshot: ShareImage, free: Callable[[], object]) -> Manifest | None:
        """The epoch's first version: a fork if the channel has this very state from an older epoch, else an anchor.
        `free` is called when `snapshot` is not needed any more. Returns what rank 0 has committed."""
        share, version = self._share, self._opening.fork_version
        self._image.copy_from(snapshot)
        free()
        sums = {p.tensor: tensor_sums(self._image.bits(p), p.start, self._threads) for p in share.pieces}
        own = self._record(version, OPENING, sums=sums)
        fork: Base | None = None
        if self._commits is None:
            self._leave(own)
            kind = self._decision()
        else:
            fork = self._commits.open(own)
            kind = "anchor" if fork is None else "fork"
            if share.world_size > 1:
                self._leave(own.model_copy(update={"label": DECISION, "kind": kind, "sums": ()}))
        chunks: list[Chunk] = []
        if kind == "anchor":
            with self._telling_why_not(version, "anchor"):
                chunks = self._uploads.put_all(self._encode(None, self._image, []))
        made = self._record(version, "anchor", chunks=chunks, changed=sum(p.size for p in share.pieces))
        if self._commits is not None:
            return self._commits.begin(made, fork)
        if kind == "anchor":
            self._leave(made)
        return None

    def publish(self, order: PublishOrder, snapshot: ShareImage, free: Callable[[], object]) -> Manifest | None:
        """As `begin`, for the delta to the next version."""
        changes: list[Change] = []
        base = self._history.at(self._history.head)
        with self._telling_why_not(order.version, "delta"):
            chunks = self._uploads.put_all(self._encode(base, snapshot, changes))
        sums = _growth(changes)
        self._history.advance(order.version, changes)
        free()
        changed = sum(change.count for change in changes)
        own = self._record(order.version, "delta", chunks=chunks, changed=changed, sums=sums)
        manifest = None
        if self._commits is None:
            self._leave(own)
        else:
            manifest = self._commits.commit_step(own, order.step)
        self._compactor.plan(order.version, order.step, anchor=order.anchor)
        return manifest

    def make_all_that_is_due(self) -> None:
        """All skips and anchors, now: for an order that says so."""
        while (again_s := self._compactor.work()) is not None and not self._stopping.is_set():
            self._progress()
            if again_s:
                self._stopping.wait(again_s)

    def order_anchor(self) -> AnchorOrder | None:
        """Rank 0: whether the next version is to get an anchor, and how."""
        return None if self._commits is None else self._commits.order_anchor()

    def forget(self, dropped: Iterable[IndexEntry]) -> None:
        """Rank 0: `dropped` are not on the channel any more."""
        if self._commits is not None:
            self._commits.forget(dropped)

    def idle(self) -> float | None:
        """A few milliseconds of what may wait; in how many seconds there is more, None if nothing is left."""
        again = [
            0.0 if self._history.tidy() else None,
            self._compactor.work(),
            self._tell(),
            None if self._commits is None else self._commits.background(),
        ]
        return min((seconds for seconds in again if seconds is not None), default=None)

    def close(self) -> None:
        self._uploads.close()
        self._background_uploads.close()

    def _encode(self, base: Source | None, new: Source, changes: list[Change]) -> Iterator[bytes]:
        """The chunks of the share, job by job; what changed goes into `changes`."""
        layout = self._share.layout

        def one(job: Job) -> tuple[tuple[bytes, ...], list[Change]]:
            result = encode_job(layout, job, base, new)
            return result.chunks, [Change.of(part) for part in result.parts]

        for chunks, found in self._threads.in_order(one, self._jobs):
            changes += found
            for chunk in chunks:
                yield chunk
                self._progress()

    def _made_in_background(self, outcome: Outcome) -> None:
        task = outcome.task
        record = self._record(
            task.version, task.label, chunks=outcome.chunks, changed=outcome.changed_elements,
            declined=outcome.declined[:1000],
        )  # fmt: skip
        if self._commits is None:
            self._untold.append(record)
        else:
            self._commits.later(record, step=task.step, base=task.base)

    def _tell(self) -> float | None:
        """Leave word of what was made in the background; in how many seconds to call again, None if all is said."""
        if not self._untold:
            return None
        record = self._untold[0]
        try:
            self._hub.channel.put_share(record.policy, record.label, record.rank, record.to_text(self._signer))
        except TemporaryError as error:
            structlog.get_logger().debug("the hub does not take word of a share now", error=str(error))
            return 1.0
        self._untold.popleft()
        return 0.0

    @contextlib.contextmanager
    def _telling_why_not(self, version: int, label: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._commits is None and not self._stopping.is_set():
                lasting = isinstance(error, ConfigError)
                record = self._record(version, label, declined=str(error)[:1000] or repr(error), lasting=lasting)
                with contextlib.suppress(AnabranchError):
                    self._hub.channel.put_share(record.policy, label, record.rank, record.to_text(self._signer))
            raise

    def _record(
        self, version: int, label: str, *, chunks: Iterable[Chunk] = (), changed: int = 0, declined: str = "",
        lasting: bool = False, sums: dict[int, Sums] | None = None,
    ) -> ShareRecord:  # fmt: skip
        return ShareRecord(
            run=self._opening.run, epoch=self._opening.epoch, version=version, label=label, rank=self._share.rank,
            chunks=tuple(chunks), changed_elements=changed, declined=declined, lasting=lasting,
            sums=tuple((tensor, a, b) for tensor, (a, b) in (sums or {}).items()),
        )  # fmt: skip

    def _leave(self, record: ShareRecord) -> None:
        text = record.to_text(self._signer)
        retry_until(
            lambda: self._hub.channel.put_share(record.policy, record.label, record.rank, text),
            deadline_s=self._config.connect_deadline_s,
            what=f"the hub's Redis, to leave word of the share of {record.label} {record.policy}",
            sleep=self._stopping.wait,
            should_stop=self._stopping.is_set,
        )

    def _decision(self) -> str:
        """How rank 0 begins the epoch."""
        policy = PolicyVersion(self._opening.epoch, self._opening.fork_version)
        deadline_s = PATIENCE * self._config.connect_deadline_s

        def read() -> str | None:
            if self._stopping.is_set():
                raise AnabranchError("closed before the epoch began")
            return self._hub.channel.shares(policy, DECISION).get(0)

        text = wait_until(
            lambda: retry_until(read, deadline_s=deadline_s, what="the hub's Redis, for the decision of rank 0"),
            deadline_s=deadline_s, what=f"rank 0 of the learner to begin epoch {policy.epoch}", poll_s=POLL_S,
            sleep=self._stopping.wait,
        )  # fmt: skip
        return read_record(text, run=self._opening.run, policy=policy, label=DECISION, rank=0, signer=self._signer).kind


def _growth(changes: Iterable[Change]) -> dict[int, Sums]:
    """By how much the sums of each tensor grow."""
    grown: dict[int, Sums] = {}
    for change in changes:
        grown[change.piece.tensor] = add_sums(grown.get(change.piece.tensor, NOTHING), change.sums())
    return grown
