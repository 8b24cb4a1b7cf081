"""Rank 0's part of publishing: of what the ranks have left (`RankShares`), add up the digests and commit the manifest.

Invariant: a manifest is committed only when every rank's share of it is stored; it is made once, so a commit that is
tried again is of the very same bytes. What is made in the background (skips, anchors beside a delta) is committed when
it happens to be complete, and given up without harm when it is not worth it or does not come. Held by
tests/unit/learner/test_commits.py.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from anabranch.kernels.delta_codec import CODEC
from anabranch.kernels.digest import NOTHING, Sums, add_sums, digest_of_sums
from anabranch.learner.compactor import NO_MEMORY
from anabranch.learner.fork_way import Way
from anabranch.learner.known_entries import KnownEntries
from anabranch.learner.publish_order import AnchorOrder, EpochOpening
from anabranch.learner.rank_shares import RankShares, poll_s
from anabranch.learner.share_record import ShareRecord
from anabranch.schemas.errors import ManifestError, TemporaryError
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Base, Kind, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.retry import retry_until
from anabranch.transport.signing import Signer
from anabranch.transport.weight_channel import WeightChannel

T = TypeVar("T")
BACKGROUND_POLL_S = 0.05
GIVE_UP_S = 600.0  # on a skip or an anchor whose other shares do not come
LATEST = 1000  # versions behind the head, beyond the longest skip, at which a skip or an anchor can still be committed


@dataclass(frozen=True, slots=True)
class Background:
    """A manifest made beside the steps: rank 0's own record of it is there."""

    kind: Kind
    step: int
    base: int | None
    own: ShareRecord
    since_s: float


class Commits:
    """Lives in rank 0's publishing thread, which owns `channel`. `sums`: of the whole state, by tensor."""

    def __init__(
        self,
        channel: WeightChannel,
        layout: Layout,
        opening: EpochOpening,
        *,
        world_size: int,
        reach: int,
        deadline_s: float,
        threads: int,
        progress: Callable[[], object],
        signer: Signer | None,
        on_committed: Callable[[Manifest], object],
        should_stop: Callable[[], bool],
    ) -> None:
        self._channel, self._layout, self._opening = channel, layout, opening
        self._world_size, self._reach, self._deadline_s = world_size, reach, deadline_s
        self._threads, self._progress = threads, progress
        self._signer, self._on_committed, self._should_stop = signer, on_committed, should_stop
        self._shares = RankShares(
            channel, world_size=world_size, deadline_s=deadline_s, signer=signer, should_stop=should_stop
        )
        self._sums: dict[int, Sums] = dict.fromkeys(range(len(layout.tensors)), NOTHING)
        self._tensor_digests = {t.name: digest_of_sums(NOTHING) for t in layout.tensors}
        self._elements = sum(t.numel for t in layout.tensors)
        self._digests: dict[int, str] = {}  # of versions that a skip can still begin at
        self._waiting: deque[Background] = deque()
        self._known = KnownEntries((), reach=reach)
        self._anchor_ordered, self._next_anchor = False, AnchorOrder.BESIDE
        self._look_at_s = 0.0

    def open(self, own: ShareRecord) -> Base | None:
        """The version on the channel whose state ours is (the epoch begins as its fork), None if there is none that who
        has nothing can reach. Collects the sums of all shares and leaves the layout."""
        self._call(lambda: self._channel.put_layout(self._layout), "to store the layout")
        self._add(self._shares.complete(own))
        version, digest = self._opening.fork_version, self._digest()
        entries = self._call(self._channel.index, "to read the index")
        self._known = KnownEntries(entries, reach=self._reach)
        self._digests[version] = digest
        same = {e.policy for e in entries if e.digest == digest and e.policy.version == version}
        older = sorted((p for p in same if p.epoch < self._opening.epoch), reverse=True)
        found = next((p for p in older if self._can_be_followed(entries, p)), None)
        return None if found is None else Base(epoch=found.epoch, version=found.version, digest=digest)

    def _can_be_followed(self, entries: Sequence[IndexEntry], policy: PolicyVersion) -> bool:
        way = Way(self._channel, entries, policy, threads=self._threads, progress=self._progress)
        return self._call(lambda: way.can_be_followed(time_s=self._deadline_s / 2), f"to read the way to {policy}")

    def begin(self, own: ShareRecord, fork: Base | None) -> Manifest:
        """Commit the epoch's first version: `fork`, or the anchor that `own` is a share of."""
        step = self._opening.step
        if fork is not None:
            return self._commit(self._manifest("fork", self._opening.fork_version, fork, step, []))
        records = self._shares.complete(own)
        return self._commit(self._manifest("anchor", self._opening.fork_version, None, step, records))

    def commit_step(self, own: ShareRecord, step: int) -> Manifest:
        """Wait for the other ranks, then move the head to the version of `own`."""
        records = self._shares.complete(own)
        self._add(records)
        version = own.version
        self._digests[version] = self._digest()
        self._digests.pop(version - LATEST - self._reach - 1, None)
        manifest = self._manifest("delta", version, self._base(version - 1), step, records)
        try:
            return self._commit(manifest)
        except ManifestError as error:
            if self._holds(version - 1):
                raise
            raise TemporaryError(
                f"the hub has lost version {version - 1}, which it had taken ({error}); start the learner again: it opens a "
                "new epoch from its checkpoint"
            ) from error

    def _holds(self, version: int) -> bool:
        """Whether `version` of this epoch is on the channel with the state that was published."""
        base = self._base(version)
        above = PolicyVersion(base.epoch, version - 1) if version else None
        entries = self._call(lambda: self._channel.index(above=above), "to see what it has lost")
        return any(e.policy == PolicyVersion(base.epoch, version) and e.digest == base.digest for e in entries)

    def order_anchor(self) -> AnchorOrder | None:
        """Whether the next version is to get an anchor too; once, until it is there or given up."""
        head = max(self._digests)
        if self._anchor_ordered or not self._known.anchor_is_due(PolicyVersion(self._opening.epoch, head)):
            return None
        self._anchor_ordered = True
        return self._next_anchor

    def forget(self, dropped: Iterable[IndexEntry]) -> None:
        """`dropped` are not on the channel any more."""
        self._known.forget(dropped)

    def later(self, own: ShareRecord, *, step: int, base: int | None) -> None:
        """Rank 0's part of a skip from `base`, or of an anchor (None), is done or declined."""
        self._waiting.append(Background("anchor" if base is None else "skip", step, base, own, time.monotonic()))

    def background(self) -> float | None:
        """Commit what has become complete; in how many seconds to call again, None if nothing is waited for."""
        if not self._waiting:
            return None
        if (early_s := self._look_at_s - time.monotonic()) > 0:
            return early_s
        if self._world_size > 1:  # else nobody has to be asked
            now = time.monotonic()
            self._look_at_s = now + poll_s(BACKGROUND_POLL_S, now - self._waiting[0].since_s)
        for _ in range(len(self._waiting)):
            made = self._waiting.popleft()
            try:
                if not self._settled(made):
                    self._waiting.append(made)
            except TemporaryError as error:
                self._waiting.append(made)
                self._look_at_s = time.monotonic() + 1.0
                structlog.get_logger().debug("the hub does not take a background manifest now", error=str(error))
                return 1.0
            except ManifestError as error:  # its base was dropped meanwhile, or a share of it expired
                self._give_up(made, [made.own], str(error))
        return BACKGROUND_POLL_S if self._waiting else None

    def _settled(self, made: Background) -> bool:
        """Committed, or given up."""
        label = made.own.label
        records = self._shares.present(made.own) if not made.own.declined else [made.own]
        declined = next((r for r in records if r.declined), None)
        if declined is not None:
            if made.kind == "anchor" and declined.declined == NO_MEMORY:
                self._next_anchor = AnchorOrder.WAIT
            self._give_up(made, records, f"rank {declined.rank}: {declined.declined}")
            return True
        if len(records) < self._world_size:
            if time.monotonic() - made.since_s > GIVE_UP_S:
                self._give_up(made, records, f"{label} {made.own.policy}: {self._shares.missing(records)} did not come")
                return True
            return False
        base = None if made.base is None else self._base(made.base)
        manifest = self._manifest(made.kind, made.own.version, base, made.step, records)
        if made.kind == "skip" and not self._known.is_worth(IndexEntry.of(manifest)):
            self._give_up(made, records, "no smaller than what it replaces")
            return True
        self._channel.commit(manifest)
        self._committed(manifest)
        return True

    def _give_up(self, made: Background, records: list[ShareRecord], why: str) -> None:
        if made.kind == "anchor":
            self._anchor_ordered = False
        with contextlib.suppress(TemporaryError):  # else they expire after some hours
            self._channel.disown(chunk.digest for record in records for chunk in record.chunks)
        self._shares.drop(made.own.policy, made.own.label)
        structlog.get_logger().debug("not made", manifest=f"{made.own.label} {made.own.policy}", why=why)

    def _add(self, records: list[ShareRecord]) -> None:
        grown: set[int] = set()
        for record in records:
            for tensor, sums in record.sums_by_tensor().items():
                if tensor not in self._sums:
                    raise ManifestError(f"rank {record.rank} has a sum of tensor {tensor}, which the layout lacks")
                self._sums[tensor] = add_sums(self._sums[tensor], sums)
                grown.add(tensor)
        for tensor in grown:
            self._tensor_digests[self._layout.tensors[tensor].name] = digest_of_sums(self._sums[tensor])

    def _digest(self) -> str:
        return root_digest(self._layout, self._tensor_digests)

    def _base(self, version: int) -> Base:
        return Base(epoch=self._opening.epoch, version=version, digest=self._digest_of(version))

    def _digest_of(self, version: int) -> str:
        try:
            return self._digests[version]
        except KeyError:
            raise ManifestError(f"version {version} is too old for another manifest") from None

    def _manifest(self, kind: Kind, version: int, base: Base | None, step: int, records: list[ShareRecord]) -> Manifest:
        made = Manifest(
            kind=kind,
            run=self._opening.run,
            epoch=self._opening.epoch,
            version=version,
            base=base,
            result_digest=self._digest_of(version),
            layout_hash=self._layout.hash,
            codec=CODEC,
            chunks=tuple(chunk for record in records for chunk in record.chunks),
            full_bytes=self._layout.payload_bytes,
            changed_elements=sum(record.changed_elements for record in records),
            total_elements=self._elements,
            learner_step=step,
            fork_version=self._opening.fork_version,
            published_ms=time.time_ns() // 1_000_000,
        )
        return made if self._signer is None else self._signer.sign(made)

    def _commit(self, manifest: Manifest) -> Manifest:
        self._call(lambda: self._channel.commit(manifest), f"to commit {manifest.label} {manifest.policy}")
        self._committed(manifest)
        return manifest

    def _committed(self, manifest: Manifest) -> None:
        self._known.add(IndexEntry.of(manifest))
        if manifest.kind == "anchor":
            self._anchor_ordered = False
        self._shares.drop(manifest.policy, manifest.label)
        self._on_committed(manifest)

    def _call(self, call: Callable[[], T], why: str) -> T:
        what = f"the hub's Redis, {why}"
        return retry_until(call, deadline_s=self._deadline_s, what=what, should_stop=self._should_stop)
