"""Publishes one rank's share of every version, in the background: the loop waits for a copy in memory, no more.

Invariant: the head moves only when all chunks of all ranks, the digest and the manifest are stored, version by version.
A publisher that has failed publishes nothing further, and says so at the next call; what is committed stays as it was.
Memory: an image of the share, one snapshot, undo records up to `channel.skip_memory_bytes`, and while a version is being
published its changes: 4 bytes and two bit patterns for each changed element, less where many change. Held by
tests/unit/learner/test_weight_publisher.py and tests/process/test_publisher_memory.py.

Order of calls, the same on every rank: `open`, then `publish` of every version; `close` at the end. On rank 0 also
`next_order` before each, and `flush` where a version has to be served before the loop goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, Queue

from anabranch.kernels.workers import Workers
from anabranch.learner.housekeeper import Housekeeper
from anabranch.learner.publish_order import AnchorOrder, EpochOpening, Published, PublishOrder
from anabranch.learner.publish_worker import PublishWorker
from anabranch.learner.rank_shares import PATIENCE
from anabranch.learner.share_publishing import Share, SharePublishing
from anabranch.learner.version_lines import VersionLines
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.retry import retry_until
from anabranch.transport.signing import load_signer
from anabranch.transport.wiring import Hub

LONGEST = (
    4 * PATIENCE
)  # times connect_deadline_s, without progress: what publishing waits for has failed by itself before
CLOSE_S = 20.0


class WeightPublisher:
    """One rank's publisher of one epoch.

    Args:
        connect: makes a connection of its own to the hub; called in the threads that use it.
        on_committed: rank 0: called in the publishing thread after the commit of every step, with its own hub.
        lines: rank 0: where every committed manifest is told of.
        waiting: called every now and then with what a method waits for; may be set later.
    """

    def __init__(
        self,
        share: Share,
        connect: Callable[[], Hub],
        config: ChannelSection,
        opening: EpochOpening,
        *,
        on_committed: Callable[[Hub, PolicyVersion], object] = lambda hub, policy: None,
        lines: VersionLines | None = None,
        waiting: Callable[[str], object] = lambda what: None,
    ) -> None:
        self._lines = lines
        self._share, self._connect, self._config, self._opening = share, connect, config, opening
        self._on_committed, self.waiting = on_committed, waiting
        self._signer = load_signer(config.signing_key_file) if config.signing_key_file else None
        self._snapshot, self._snapshot_is_free = share.image(pinned=True), True
        self._threads = Workers(config.codec_threads)
        self._due = Queue[AnchorOrder]()  # from the publishing thread to `next_order`
        self.published: Published | None = None  # rank 0: the newest version on the channel
        self._hub: Hub | None = None  # of the publishing thread, as is what follows
        self._began_s: float | None = None  # when the copy of the weights was there that is being published
        self._publishing: SharePublishing | None = None
        self._dropped = Queue[Sequence[IndexEntry]]()  # from the housekeeper to the publishing thread
        self._housekeeper = (
            Housekeeper(connect, config.retain_bytes, on_dropped=self._dropped.put) if share.rank == 0 else None
        )
        self._worker = PublishWorker(f"weight publisher {share.rank}", self._idle, at_end=self._end)

    def open(self) -> None:
        """Publish the present weights as the epoch's first version: a fork of the same state if the channel has it from
        an older epoch, else an anchor. Collective; the version is there after `flush`."""
        self._take_snapshot()
        started = time.monotonic()
        self._worker.submit(lambda: self._open(started))

    def next_order(self, version: int) -> PublishOrder:
        """Rank 0: how `version` is to be published, by all ranks."""
        try:
            due = self._due.get_nowait()
        except Empty:
            return PublishOrder(version, step=version)
        return PublishOrder(version, step=version, anchor=True, wait=due is AnchorOrder.WAIT)

    def publish(self, order: PublishOrder) -> float:
        """Copy the present weights, have them published, and return how long that took (seconds). Collective.

        Raises:
            DeadlineError: the version before does not come to an end (if it has failed: its own error).
        """
        started = time.monotonic()
        self._take_snapshot()
        taken = time.monotonic()
        self._worker.submit(lambda: self._publish(order, taken))
        return taken - started

    def check(self) -> None:
        """Raises what publishing has failed with."""
        self._worker.check()

    def flush(self) -> Published | None:
        """Wait until everything handed over is published (rank 0: committed); returns the newest. Raises as `publish`."""
        self._wait(lambda: self._worker.is_free, "the weights handed over to be published")
        return self.published

    def drain(self, *, deadline_s: float = 600.0) -> None:
        """`flush`, and the skips, anchors and retention that are due."""
        tidy = self._housekeeper
        self._wait(
            lambda: self._worker.is_quiet and (tidy is None or tidy.is_quiet),
            "skip deltas, anchors and retention",
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """End its threads, whatever they are at. What is not committed stays uncommitted."""
        self._worker.close(deadline_s=CLOSE_S)
        if self._housekeeper is not None:
            self._housekeeper.close(deadline_s=CLOSE_S)
        self._threads.close()

    @property
    def cpu_s(self) -> float:
        """Processor time of the publishing thread; `channel.codec_threads` − 1 more help it."""
        return self._worker.cpu_s

    def _wait(self, done: Callable[[], bool], what: str, *, deadline_s: float | None = None) -> None:
        deadline_s = LONGEST * self._config.connect_deadline_s if deadline_s is None else deadline_s
        self._worker.wait(done, deadline_s=deadline_s, what=what, heartbeat=lambda: self.waiting(what))

    def _take_snapshot(self) -> None:
        self._wait(lambda: self._snapshot_is_free, "the version before to be encoded and stored")
        self._snapshot_is_free = False
        self._share.copy_to(self._snapshot)

    # In the publishing thread.

    def _open(self, started_s: float) -> None:
        self._hub, self._began_s = self._connect(), started_s
        self._publishing = SharePublishing(
            self._share, self._hub, self._config, self._opening,
            signer=self._signer, threads=self._threads, on_manifest=self._on_manifest,
            progress=self._worker.progress, stopping=self._worker.stopping,
        )  # fmt: skip
        self._report(self._publishing.begin(self._snapshot, self._free_snapshot), started_s)
        if self._lines is not None:
            with contextlib.suppress(TemporaryError):  # the next epoch tries it again
                self._lines.catch_up(self._hub.channel)

    def _publish(self, order: PublishOrder, started_s: float) -> None:
        assert self._publishing is not None
        assert self._hub is not None
        self._began_s = started_s
        manifest = self._publishing.publish(order, self._snapshot, self._free_snapshot)
        self._report(manifest, started_s)
        if manifest is not None:
            retry_until(
                partial(self._on_committed, self._hub, manifest.policy),
                deadline_s=self._config.connect_deadline_s,
                what=f"the hub's Redis, to hand out permits for version {order.version}",
                sleep=self._worker.stopping.wait,
                should_stop=self._worker.stopping.is_set,
            )
        if order.wait:
            self._publishing.make_all_that_is_due()
        while not self._dropped.empty():
            self._publishing.forget(self._dropped.get())
        if (due := self._publishing.order_anchor()) is not None:
            self._due.put(due)

    def _report(self, manifest: Manifest | None, started_s: float) -> None:
        self._began_s = None
        if manifest is not None:
            self.published = Published(manifest, time.monotonic() - started_s)

    def _on_manifest(self, manifest: Manifest) -> None:
        if self._lines is not None:
            beside = self._began_s is None or manifest.kind == "skip"
            self._lines.append(manifest, commit_s=None if beside else time.monotonic() - self._began_s)
        if self._housekeeper is not None:
            self._housekeeper.committed(manifest.payload_bytes)

    def _free_snapshot(self) -> None:
        self._snapshot_is_free = True
        self._worker.tell()

    def _idle(self) -> float | None:
        return None if self._publishing is None else self._publishing.idle()

    def _end(self) -> None:
        if self._publishing is not None:
            self._publishing.close()
        if self._hub is not None:
            self._hub.close()
