"""Faults of processes: kill −9, a freeze that only the watchdog ends, a short freeze of a server.

Invariant: a signal goes to the supervised process of that name and to no other. Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import ClassVar

from anabranch.deploy.chaos.fault import Fault, FaultPlan
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.place import WATCHDOG_S
from anabranch.deploy.child import ChildState

PULSE_S = 3.0  # a process that beat within this is at work


class Kill(Fault):
    """kill −9. Recovered once another process of that name is at work."""

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self._pid: int | None = None

    def inject(self, lab: Lab) -> bool:
        child = lab.children[self.plan.target]
        if child.state is not ChildState.RUNNING or child.pid is None:
            return False
        self._pid = child.pid
        os.kill(child.pid, signal.SIGKILL)
        return True

    def recovered(self, lab: Lab) -> bool:
        return another_is_at_work(lab, self.plan.target, self._pid) and super().recovered(lab)


class KillProducer(Kill):
    kind, weight, where = "kill producer", 7, "producer"


class KillLearner(Kill):
    kind, weight, where = "kill learner", 5, "learner"


class KillRecorder(Kill):
    kind, weight, where = "kill recorder", 4, "recorder"


class KillRegionServer(Kill):
    kind, weight, where = "kill region's Redis", 8, "server"


class KillHubServer(Kill):
    kind, weight, where = "kill hub's Redis", 5, "redis-hub"


class Freeze(Fault):
    """SIGSTOP until the watchdog has had enough."""

    weight: ClassVar[float] = 2.5
    patience_s = WATCHDOG_S + 20.0

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self._pid: int | None = None

    def inject(self, lab: Lab) -> bool:
        child = lab.children[self.plan.target]
        if not lab.alive(self.plan.target) or child.pid is None:
            return False  # the watchdog watches only who has reported itself
        self._pid = child.pid
        os.kill(child.pid, signal.SIGSTOP)
        return True

    def lift(self, lab: Lab) -> bool:
        return lab.children[self.plan.target].pid != self._pid

    def recovered(self, lab: Lab) -> bool:
        return another_is_at_work(lab, self.plan.target, self._pid) and super().recovered(lab)


class FreezeProducer(Freeze):
    kind, where = "freeze producer", "producer"


class FreezeLearner(Freeze):
    kind, where = "freeze learner", "learner"


class FreezeRecorder(Freeze):
    kind, where = "freeze recorder", "recorder"


class FreezeServer(Fault):
    kind, weight, where, seconds = "freeze Redis", 7, "servers", (1.0, 5.0)

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self._pid: int | None = None

    def inject(self, lab: Lab) -> bool:
        child = lab.children[self.plan.target]
        if not lab.alive(self.plan.target) or child.pid is None:
            return False
        self._pid = child.pid
        os.kill(child.pid, signal.SIGSTOP)
        return True

    def lift(self, lab: Lab) -> bool:
        if lab.children[self.plan.target].pid == self._pid and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)
        return True


def another_is_at_work(lab: Lab, name: str, old_pid: int | None) -> bool:
    child = lab.children[name]
    if child.pid is None or child.pid == old_pid or not lab.alive(name):
        return False
    return name in lab.place.servers or (child.silent_s is not None and child.silent_s < PULSE_S)


KINDS: tuple[type[Fault], ...] = (
    KillProducer, KillLearner, KillRecorder, KillRegionServer, KillHubServer,
    FreezeProducer, FreezeLearner, FreezeRecorder, FreezeServer,
)  # fmt: skip
