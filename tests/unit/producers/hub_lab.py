"""A hub in memory and producers' links to it, on one clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.producers.hub_link import HubLink
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_world import MemoryWorld

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
LEASE_MS = 60_000
BATCH = 4


def status(state: str = "sampling") -> ProducerStatus:
    return ProducerStatus(updated_ms=1, region="east", pid=1, state=state, policy="e1.v0")


class Lab:
    """A hub in memory and producers on it, all by one clock that the test sets; `turn` is one round of the thread."""

    def __init__(self, *, max_age: int = 1, total: int = 100) -> None:
        self.now_s = 1000.0
        self.world = MemoryWorld("run", clock_ms=lambda: self.now_s * 1000)
        self.permits, self.evaluations, self.runs = self.world.permits, self.world.evaluations, self.world.runs
        self.runs.start()
        self.permits.reset(epoch=1, version=0, batch=BATCH, max_age=max_age, total=total, accepted=())

    def link(self, producer: str = "east-1", *, clock: Callable[[], float] | None = None) -> HubLink:
        return HubLink(
            self.permits, self.runs, self.evaluations, producer=producer, lease_ms=LEASE_MS, poll_ms=1, status=status,
            clock=clock or (lambda: self.now_s), clock_ms=lambda: round(self.now_s * 1000) + 7,
        )  # fmt: skip


def taken(link: HubLink, most: int = 100) -> list[int]:
    return [p.group_index for p in link.take(most)]


def granted(lab: Lab, link: HubLink, groups: int, policy: PolicyVersion = V0) -> list[int]:
    link.want(groups, policy)
    link.turn()
    return taken(link)
