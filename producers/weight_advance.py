"""Takes a node's mirror to the head of the channel: plan, fetch, decode, verify, write, one manifest after the other.

Invariant: every manifest on the way leaves the mirror at a version whose digest was checked. What is broken (a manifest
missing or forged, a chunk that stays bad, a wrong digest) is left out, by the next attempts too for a while, and the rest
planned anew from where the mirror is, so the last resort is an anchor. When an update does not fit because the mirror itself was damaged, that is found out and the
mirror begins anew. The next manifests' chunks are fetched while one is decoded. Held by
tests/unit/producers/test_weight_follower.py and tests/unit/producers/test_weight_advance.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from anabranch.kernels.delta_codec import decode
from anabranch.kernels.workers import Workers
from anabranch.producers.broken_manifests import BrokenManifests
from anabranch.producers.fetcher import Fetcher
from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.node_mirror import NodeMirror
from anabranch.producers.weight_plan import AnotherState, Plan, Planner, Unusable
from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import Named
from anabranch.transport.weight_path import State

LEASE_WAIT_S = 5.0  # before the first fetch, so that retention knows of it
LEASE_TRIES = 3  # a second look needs an older version than the first at most when the channel is dropping much
MAX_DETOURS = 16  # broken manifests of one attempt


@dataclass(frozen=True, slots=True)
class News:
    """`WeightChannel.news(above)`, its entries."""

    above: PolicyVersion
    entries: Sequence[IndexEntry]


class Unfit(Unusable):
    """Chunks that are as they are named do not make the version that they should."""


class Advancer:
    def __init__(
        self, mirror: NodeMirror, planner: Planner, fetcher: Fetcher, workers: Workers, leases: LeaseKeeper | None
    ) -> None:
        self._mirror, self._planner, self._fetcher = mirror, planner, fetcher
        self._workers, self._leases = workers, leases
        self._way: list[str] = []  # what was applied on the way to the head, and its bytes
        self._way_bytes = 0
        self._broken = BrokenManifests()
        self._log = structlog.get_logger()

    def advance_to(self, head: PolicyVersion, news: News | None = None) -> None:
        """With the mirror's turn.

        Args:
            news: the index above a version, read with `head`; it saves a round trip when that version is what is at hand.

        Raises:
            ManifestError: no path is left; says what was found broken on the way.
            ModelMismatchError: the channel's weights are of another layout, and the mirror holds none.
            StreamUnavailableError, DeadlineError: the channel or the blob store cannot be reached, or a reader does not
                let go of the mirror; what was reached until then stays.
        """
        self._mirror.recover()
        self._way, self._way_bytes = [], 0
        # Another state than the one at hand is no fault of a manifest's: the next attempt may have another one
        broken = {name: e for name, e in self._broken.now().items() if not isinstance(e, AnotherState)}
        found = 0
        while True:
            content = self._mirror.content()
            if content is not None and content.policy >= head:
                self._broken.clear()
                return
            have = None if content is None else State(content.policy, content.digest)
            try:
                newer = news.entries if news is not None and have is not None and have.policy == news.above else None
                self._follow(self._plan(have, head, broken, newer), head)
            except Unusable as error:
                broken |= error.broken
                self._remember(head, error)
                found += len(error.broken)
                if found > MAX_DETOURS:
                    raise ManifestError(f"too much on the way to weights {head} is broken: {error}") from error

    def _plan(
        self,
        have: State | None,
        head: PolicyVersion,
        broken: dict[Named, Exception],
        newer: Sequence[IndexEntry] | None,
    ) -> Plan:
        """A plan whose versions are leased. Retention may have acted between the look at the index and the lease, so who
        has moved its lease back looks again."""
        plan = self._planner.plan(have, head, broken, newer=newer)
        for _ in range(LEASE_TRIES):
            if self._leases is None or plan.needs is None:
                break
            if not self._leases.protect(plan.needs, wait_s=LEASE_WAIT_S):
                break
            plan = self._planner.plan(have, head, broken)
        return plan

    def _remember(self, head: PolicyVersion, error: Unusable) -> None:
        """And into the log, each manifest once: the attempt comes again every few seconds."""
        if not self._broken.knows_all(error.broken):
            self._log.warning("weights refused; looking for another path", head=str(head), error=str(error))
        self._broken.add(error.broken, unfit=isinstance(error, Unfit))

    def _follow(self, plan: Plan, head: PolicyVersion) -> None:
        mirror = self._mirror
        mirror.set_goal(head)
        if plan.same_state is not None:
            mirror.rename(plan.same_state, path=[*self._way, *plan.path])
        with contextlib.closing(self._fetcher.in_order(plan.manifests)) as fetched:
            for manifest in plan.manifests:
                try:
                    self._apply(manifest, _chunks(manifest, fetched))
                except (DeltaError, ManifestError) as error:
                    if mirror.distrust():
                        self._log.error("this node's copy of the weights was damaged; it begins anew", error=str(error))
                        return
                    raise Unfit({(manifest.policy, manifest.label): error}) from error
                mirror.note_progress()

    def _apply(self, manifest: Manifest, chunks: list[bytes]) -> None:
        mirror = self._mirror
        way, way_bytes = [*self._way, f"{manifest.label} {manifest.policy}"], self._way_bytes + manifest.payload_bytes
        if manifest.base is None:
            mirror.rebuild(manifest, chunks, path=way, path_bytes=way_bytes)
        else:
            changes = decode(mirror.layout, chunks, mirror.bits, self._workers)
            mirror.advance(manifest, changes, path=way, path_bytes=way_bytes)
        self._way, self._way_bytes = way, way_bytes


def _chunks(manifest: Manifest, fetched: Iterator[tuple[Manifest, list[bytes]]]) -> list[bytes]:
    """Of the manifest whose turn it is. Raises Unusable where `Fetcher.in_order` raises DeltaError."""
    try:
        return next(fetched)[1]
    except DeltaError as error:
        raise Unusable({(manifest.policy, manifest.label): error}) from error
