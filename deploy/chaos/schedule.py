"""Which faults come when: drawn from a seed before the run begins.

Invariant: the same seed, number, spacing, regions and kinds give the same list; with at least as many faults as kinds, every
kind comes. Held by tests/unit/deploy/chaos/test_schedule.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from anabranch.deploy.chaos import entry_faults, place_faults, power, process_faults
from anabranch.deploy.chaos.fault import Fault, FaultPlan
from anabranch.schemas.errors import UsageError

KINDS: dict[str, type[Fault]] = {
    kind.kind: kind for kind in (*process_faults.KINDS, *power.KINDS, *place_faults.KINDS, *entry_faults.KINDS)
}


def slug(kind: str) -> str:
    """A kind's name on a command line."""
    return kind.replace("'s", "").replace(" %", "-percent").replace(" ", "-").lower()


def choose(names: Iterable[str]) -> tuple[type[Fault], ...]:
    """The kinds of these slugs, all if there are none. Raises UsageError."""
    by_slug = {slug(name): kind for name, kind in KINDS.items()}
    wanted = list(names)
    unknown = [name for name in wanted if name not in by_slug]
    if unknown:
        raise UsageError(f"no such kind of fault: {', '.join(unknown)}; there are {', '.join(sorted(by_slug))}")
    return tuple(by_slug[name] for name in wanted) or tuple(KINDS.values())


def draw(
    *, faults: int, seed: int, seconds_between: float, regions: Sequence[str], kinds: Sequence[type[Fault]]
) -> list[FaultPlan]:
    """`faults` plans in order of time, `seconds_between` apart in the mean."""
    rng = random.Random(f"{seed} {faults} {sorted(kind.kind for kind in kinds)}")  # noqa: S311 - no secret
    drawn = list(kinds)
    rng.shuffle(drawn)
    drawn = drawn[:faults]
    weights = [kind.weight for kind in kinds]
    drawn += rng.choices(list(kinds), weights, k=faults - len(drawn))
    rng.shuffle(drawn)
    plans, at_s = [], 0.0
    for number, kind in enumerate(drawn, start=1):
        at_s += seconds_between * rng.uniform(0.4, 1.6)
        target = rng.choice(kind.targets(regions))
        seconds = round(rng.uniform(*kind.seconds), 1)
        plans.append(FaultPlan(number, round(at_s, 2), kind.kind, target, seconds, rng.choice(kind.amounts)))
    return plans


def make(plan: FaultPlan) -> Fault:
    return KINDS[plan.kind](plan)
