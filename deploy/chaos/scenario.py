"""What happens in a chaos run between warm-up and end: the protocol of a scenario, and random faults as the first of them.

Invariant: at most `MOST_AT_ONCE` faults are unhealed at any time, so that the run can get through any number of them; whatever
a scenario has changed it puts back in `abandon`. Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from anabranch.deploy.chaos.fault import Fault, FaultPlan, Phase
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.schedule import make
from anabranch.deploy.chaos.verdict import Check
from anabranch.deploy.chaos.waits import Wait

MOST_AT_ONCE = 6
CALM_STEPS = 10
CALM_S = 8.0
SAY_EVERY_S = 5.0


class Scenario(Protocol):
    name: str
    deadline_s: float
    overrides: Sequence[str]  # of the configuration, over those of every chaos run

    def begin(self, lab: Lab) -> None: ...
    def turn(self, lab: Lab) -> bool:
        """Called about ten times a second; True when the run may end."""
        ...

    def abandon(self, lab: Lab) -> None:
        """Put everything back at once; may be called again."""
        ...

    def say(self, lab: Lab | None, phase: str, out: TextIO) -> None: ...
    def waits(self, lab: Lab) -> list[Wait]:
        """Those that no status on the hub could show."""
        ...

    def checks(self, lab: Lab) -> list[Check]: ...
    def facts(self) -> dict[str, Any]:
        """For the report, as JSON."""
        ...


class RandomFaults:
    """Faults by plan, as many at once as `MOST_AT_ONCE`; then calm: nothing happens until some more steps are made."""

    name = "random"
    overrides: Sequence[str] = ()

    def __init__(self, plans: Sequence[FaultPlan], *, seconds_between: float) -> None:
        self.plans, self.faults = list(plans), list[Fault]()
        self._next = 0
        self._began = self._said = 0.0
        self._calm_since: tuple[float, int] | None = None
        self._seconds_between = seconds_between
        self.left_out: dict[str, str] = {}
        last = self.plans[-1].at_s if self.plans else 0.0
        self.deadline_s = 2.5 * last + 900.0

    def begin(self, lab: Lab) -> None:
        self._began = time.monotonic()
        for kind in {plan.kind for plan in self.plans}:
            if why := make(next(p for p in self.plans if p.kind == kind)).lacks(lab):
                self.left_out[kind] = why
        self.plans = [plan for plan in self.plans if plan.kind not in self.left_out]

    def turn(self, lab: Lab) -> bool:
        self._admit()
        busy: set[str] = set()
        for fault in self.faults:
            if fault.phase is Phase.ACTIVE:
                busy |= fault.resources
        for fault in self.faults:
            if fault.over or (fault.phase is Phase.PLANNED and fault.resources & busy):
                continue
            fault.turn(lab)
            if fault.phase is Phase.ACTIVE:
                busy |= fault.resources
        if self._next < len(self.plans) or not all(fault.over for fault in self.faults):
            return False
        steps = len(lab.monitor.watch.steps)
        if self._calm_since is None:
            self._calm_since = (time.monotonic(), steps)
        since, at = self._calm_since
        return time.monotonic() > since + CALM_S and steps >= at + CALM_STEPS

    def _admit(self) -> None:
        """The next fault, when its time has come and not too many are unhealed. When the run is late, they come in the drawn
        order all the same, each a little after the one before."""
        while self._next < len(self.plans):
            plan = self.plans[self._next]
            unhealed = sum(not fault.over for fault in self.faults)
            if time.monotonic() < self._began + plan.at_s or unhealed >= MOST_AT_ONCE:
                return
            self.faults.append(make(plan))
            self._next += 1

    def abandon(self, lab: Lab) -> None:
        for fault in self.faults:
            if fault.phase is Phase.ACTIVE and fault.lift(lab):
                fault.phase = Phase.LIFTED

    def say(self, lab: Lab | None, phase: str, out: TextIO) -> None:
        now = time.monotonic()
        if not phase and (now < self._said + SAY_EVERY_S or lab is None or not self._began):
            return
        self._said = now
        if phase or lab is None:
            print(f"chaos: {phase}", file=out, flush=True)
            return
        samples = lab.monitor.watch.samples
        pending = samples[-1].pending if samples else {}
        left = len(self.plans) - self._next
        open_faults = [fault.describe() for fault in self.faults if not fault.over]
        rate = (now - self._began) / max(1, self._next)
        eta_s = left * max(rate, self._seconds_between) + 30
        print(
            f"chaos: fault {self._next} of {len(self.plans)}, about {eta_s / 60:.0f} min left, step {lab.monitor.last_step}, pending "
            + " ".join(f"{region} {'?' if n is None else n}" for region, n in pending.items())
            + (f" | {'; '.join(open_faults)}" if open_faults else ""),
            file=out, flush=True,
        )  # fmt: skip

    def waits(self, lab: Lab) -> list[Wait]:
        return []

    def checks(self, lab: Lab) -> list[Check]:
        from anabranch.deploy.chaos.conduct import faults_check, steps_check

        least = CALM_STEPS + len(self.plans)
        return [faults_check(self.faults, len(self.plans)), steps_check(len(lab.monitor.watch.steps), least)]

    def facts(self) -> dict[str, Any]:
        return {
            "faults": [
                {
                    "kind": f.plan.kind, "target": f.plan.target, "what": f.describe(), "phase": str(f.phase),
                    "injected_s": f.injected_s, "lifted_s": f.lifted_s, "heal_s": f.heal_s if f.phase is Phase.HEALED else None,
                }
                for f in self.faults
            ],
            "left_out": self.left_out,
        }  # fmt: skip
