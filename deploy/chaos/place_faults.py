"""Faults of places: links that are cut, lossy or slow, disks that are full, servers without memory, clocks that jump.

Invariant: what was changed is what `lift` puts back, also when the process it concerns was started anew in between.
Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import redis

from anabranch.deploy.chaos.fault import Fault, FaultPlan
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.links import RTT_MS
from anabranch.deploy.chaos.place import set_server_clock
from anabranch.deploy.chaos.stepped_clock import write_offset

_FILLER = ".filler"
NO_MEMORY = 2**20  # less than any server of ours takes
STEPS_S = (1.0, -1.0, 30.0, -30.0, 3600.0, -3600.0)


class Cut(Fault):
    kind, weight, where, seconds = "link cut", 9, "region", (2.0, 20.0)

    @property
    def resources(self) -> frozenset[str]:
        return frozenset({f"link-{self.plan.target}"})

    def inject(self, lab: Lab) -> bool:
        lab.links[self.plan.target].cut()
        return True

    def lift(self, lab: Lab) -> bool:
        lab.links[self.plan.target].mend()
        return True


class OtherLink(Fault):
    """The link is made anew with other properties, and anew again after."""

    weight, where, seconds = 6, "region", (5.0, 15.0)
    loss, rtt_ms = 0.0, RTT_MS

    @property
    def resources(self) -> frozenset[str]:
        return frozenset({f"link-{self.plan.target}"})

    def inject(self, lab: Lab) -> bool:
        lab.links[self.plan.target].make(rtt_ms=self.rtt_ms, loss=self.loss)
        return True

    def lift(self, lab: Lab) -> bool:
        lab.links[self.plan.target].make()
        return True


class Loss(OtherLink):
    kind, loss = "link loses 1 %", 0.01


class Slow(OtherLink):
    kind, rtt_ms = "link of 150 ms", 150.0


class DiskFull(Fault):
    kind, weight, where, seconds = "disk full", 12, "disk", (3.0, 9.0)

    @property
    def resources(self) -> frozenset[str]:
        return frozenset({f"disk-{self.plan.target}"})

    def inject(self, lab: Lab) -> bool:
        fill(lab.place.disks / self.plan.target)
        return True

    def hold(self, lab: Lab) -> None:
        fill(lab.place.disks / self.plan.target)

    def lift(self, lab: Lab) -> bool:
        (lab.place.disks / self.plan.target / _FILLER).unlink(missing_ok=True)
        return True


class NoMemory(Fault):
    """Every server at its limit at once."""

    kind, weight, where, seconds = "every Redis out of memory", 6, "all", (2.0, 8.0)

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self._limited: set[str] = set()

    def inject(self, lab: Lab) -> bool:
        self._limited = {site for site in lab.servers if set_memory(lab, site, NO_MEMORY)}
        return bool(self._limited)

    def lift(self, lab: Lab) -> bool:
        self._limited = {site for site in self._limited if not set_memory(lab, site, 0)}
        return not self._limited


class ClockStep(Fault):
    amounts = STEPS_S
    seconds = (3.0, 10.0)

    @property
    def resources(self) -> frozenset[str]:
        return frozenset({f"clock-{self.plan.target}"})

    def inject(self, lab: Lab) -> bool:
        set_clock(lab, self.plan.target, self.plan.amount)
        return True

    def lift(self, lab: Lab) -> bool:
        set_clock(lab, self.plan.target, 0.0)
        return True


class ServerClock(ClockStep):
    kind, weight, where = "clock step of a Redis", 6, "servers"

    @classmethod
    def lacks(cls, lab: Lab) -> str:
        return "" if lab.place.faketime else "libfaketime is not installed (package faketime)"


class LearnerClock(ClockStep):
    kind, weight, where = "clock step of the learner", 3, "learner"


class RecorderClock(ClockStep):
    kind, weight, where = "clock step of the recorder", 2, "recorder"


class ProducerClock(ClockStep):
    kind, weight, where = "clock step of a producer", 4, "producer"


def fill(disk: Path) -> None:
    """Until nothing more fits, file names and single pages included."""
    with (disk / _FILLER).open("ab") as file, contextlib.suppress(OSError):
        for chunk in (2**22, 2**16, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, chunk)


def set_memory(lab: Lab, site: str, limit_bytes: int) -> bool:
    """`maxmemory` of a server (0: none); whether it took it."""
    try:
        lab.servers[site].config_set("maxmemory", limit_bytes)
    except (redis.RedisError, OSError):
        return False
    return True


def set_clock(lab: Lab, child: str, seconds: float) -> None:
    (set_server_clock if child in lab.place.servers else write_offset)(lab.place.clocks[child], seconds)


KINDS: tuple[type[Fault], ...] = (
    Cut, Loss, Slow, DiskFull, NoMemory, ServerClock, LearnerClock, RecorderClock, ProducerClock,
)  # fmt: skip
