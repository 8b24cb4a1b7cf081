"""What a fault is: a plan drawn beforehand, and a state machine that injects it, lifts it and waits until its traces are gone.

Invariant: a fault goes PLANNED -> ACTIVE -> LIFTED -> HEALED (or OVERDUE), one way; two faults that hold the same resource
are never active together. Held by tests/unit/deploy/chaos/test_schedule.py and tests/process/test_chaos.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from anabranch.deploy.chaos.lab import Lab

HEAL_DEADLINE_S = 240.0  # several faults at once on two cores, each with programs that start anew


class Phase(StrEnum):
    PLANNED = "planned"
    ACTIVE = "active"
    LIFTED = "lifted"
    HEALED = "healed"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`at_s`: seconds after the first fault may come; `seconds`: how long it is held; `amount`: of its kind's `amounts`."""

    number: int
    at_s: float
    kind: str
    target: str
    seconds: float
    amount: float


class Fault(ABC):
    """Base of all kinds. `flows`: names of the monitor's flows that must move after it was lifted."""

    kind: ClassVar[str]
    weight: ClassVar[float] = 1.0
    seconds: ClassVar[tuple[float, float]] = (0.0, 0.0)
    amounts: ClassVar[tuple[float, ...]] = (0.0,)
    where: ClassVar[str] = ""  # "producer", "learner", "recorder", "server", "region", "hub", "disk", "all"

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.phase = Phase.PLANNED
        self.injected_s = self.lifted_s = self.healed_s = 0.0  # monotonic

    @classmethod
    def targets(cls, regions: Sequence[str]) -> tuple[str, ...]:
        return targets(cls.where, regions)

    @classmethod
    def lacks(cls, lab: Lab) -> str:
        """What this machine has not got for it; "" if nothing."""
        return ""

    @property
    def resources(self) -> frozenset[str]:
        return frozenset({self.plan.target})

    @abstractmethod
    def inject(self, lab: Lab) -> bool:
        """Do it; False: not now (the target is down)."""

    def hold(self, lab: Lab) -> None:  # noqa: B027 - most faults have nothing to do in it
        """Called again and again while it is active."""

    def lift(self, lab: Lab) -> bool:
        """End the condition, once `plan.seconds` are over; False: could not yet."""
        return True

    def flows(self, lab: Lab) -> tuple[str, ...]:
        return lab.flows_of(self.plan.target)

    def recovered(self, lab: Lab) -> bool:
        """Whether everything it touched is at work again; asked after it was lifted."""
        return all(lab.monitor.moved_since(flow, self.lifted_s) for flow in self.flows(lab))

    def turn(self, lab: Lab) -> None:
        """Move the state machine on; never blocks for long."""
        now = time.monotonic()
        if self.phase is Phase.PLANNED and self.inject(lab):
            self.phase, self.injected_s = Phase.ACTIVE, now
        elif self.phase is Phase.ACTIVE:
            if now >= self.injected_s + self.plan.seconds and self.lift(lab):
                self.phase, self.lifted_s = Phase.LIFTED, now
            else:
                self.hold(lab)
        elif self.phase is Phase.LIFTED:
            if self.recovered(lab):
                self.phase, self.healed_s = Phase.HEALED, now
            elif now > self.lifted_s + HEAL_DEADLINE_S:
                self.phase = Phase.OVERDUE

    @property
    def over(self) -> bool:
        return self.phase in (Phase.HEALED, Phase.OVERDUE)

    @property
    def heal_s(self) -> float:
        """From when it was lifted to when all was at work again."""
        return self.healed_s - self.lifted_s

    def describe(self) -> str:
        plan = self.plan
        amount = f" {plan.amount:+g} s" if "clock" in plan.kind else ""
        held = f" for {plan.seconds:.1f} s" if plan.seconds else ""
        return f"{plan.kind} {plan.target}{amount}{held}"


def targets(where: str, regions: Sequence[str]) -> tuple[str, ...]:
    """Names of what a fault can strike, by the sort of place that its kind names."""
    of_regions = {
        "producer": [f"producer-{r}" for r in regions],
        "server": [f"redis-{r}" for r in regions],
        "region": list(regions),
        "disk": [f"{kind}-{r}" for kind in ("spool", "redis") for r in regions] + ["run"],
        "servers": ["redis-hub", *(f"redis-{r}" for r in regions)],
    }
    return tuple(of_regions.get(where, [where]))
