"""Whether what is dropped differs from what is trained: figures by region and fate, out of the fate log.

Invariant: the figures of a set of groups depend only on which groups are in it. A difference is called one when it is more
than `SIGNIFICANT` standard errors of the two means together, between sets of at least `FEWEST` groups. What was consumed
without gradient (dropped:zero_variance) counts as trained here: a step saw it. Pure. Held by tests/unit/consumers/test_drops.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from anabranch.schemas.fates import TRAINED, ZERO_VARIANCE, FateRecord

SIGNIFICANT = 3.0
FEWEST = 10
CONSUMED_FATE = "consumed"  # trained and dropped:zero_variance together
SEEN = (TRAINED, ZERO_VARIANCE)


@dataclass(slots=True)
class Mean:
    """Mean and standard error of numbers that come one by one (Welford 1962); an error needs two."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self._squares += change * (value - self.mean)

    def join(self, other: Mean) -> None:
        if not other.count:
            return
        total = self.count + other.count
        change = other.mean - self.mean
        self._squares += other._squares + change * change * self.count * other.count / total
        self.mean += change * other.count / total
        self.count = total

    @property
    def error(self) -> float:
        return math.sqrt(self._squares / (self.count - 1) / self.count) if self.count > 1 else math.nan


@dataclass(slots=True)
class Tally:
    """Of a set of groups. `length`: completion tokens a rollout, mean of each group; `cut`: rollouts that ended at
    sampling.max_tokens; `age`: versions."""

    groups: int = 0
    rollouts: int = 0
    cut: int = 0
    length: Mean = field(default_factory=Mean)
    reward: Mean = field(default_factory=Mean)
    age: Mean = field(default_factory=Mean)

    def add(self, record: FateRecord) -> None:
        self.groups += 1
        self.rollouts += record.rollouts
        self.cut += record.cut
        self.length.add(record.tokens / record.rollouts)
        self.reward.add(record.reward)
        self.age.add(record.age)

    def join(self, other: Tally) -> None:
        self.groups += other.groups
        self.rollouts += other.rollouts
        self.cut += other.cut
        for mine, theirs in ((self.length, other.length), (self.reward, other.reward), (self.age, other.age)):
            mine.join(theirs)

    @property
    def cut_share(self) -> float:
        return self.cut / self.rollouts if self.rollouts else 0.0


Tallies = dict[str, dict[str, Tally]]  # region -> fate -> figures


def tally(records: Iterable[FateRecord]) -> Tallies:
    """`CONSUMED_FATE` stands for trained and dropped:zero_variance."""
    found: Tallies = {}
    for record in records:
        fate = CONSUMED_FATE if record.fate in SEEN else record.fate
        found.setdefault(record.region, {}).setdefault(fate, Tally()).add(record)
    return found


def everywhere(tallies: Mapping[str, Mapping[str, Tally]]) -> dict[str, Tally]:
    """Fate -> figures over all regions."""
    total: dict[str, Tally] = {}
    for fates in tallies.values():
        for fate, one in fates.items():
            total.setdefault(fate, Tally()).join(one)
    return total


def comparable(tallies: Mapping[str, Mapping[str, Tally]]) -> bool:
    """Whether there are enough groups, consumed and of a cause of drops, for `verdicts` to find a difference between them."""
    total = everywhere(tallies)
    kept = total.pop(CONSUMED_FATE, Tally())
    return min(kept.groups, max((one.groups for one in total.values()), default=0)) >= FEWEST


def verdicts(tallies: Mapping[str, Mapping[str, Tally]]) -> list[str]:
    """In plain words, where dropped groups differ from consumed ones, and regions from each other; empty if nowhere."""
    total = everywhere(tallies)
    kept = total.get(CONSUMED_FATE, Tally())
    found: list[str] = []
    for fate in sorted(total.keys() - {CONSUMED_FATE}):
        found += _compared(fate, total[fate], kept)
    return found + _regions(tallies)


def _compared(fate: str, dropped: Tally, kept: Tally) -> list[str]:
    found = []
    if (by := _apart(dropped.length, kept.length)) is not None:
        more, less, trained = ("slow", "fast", "shorter") if by > 0 else ("fast", "slow", "longer")
        found.append(
            f"{fate}: {more} groups are dropped more than {less} ones: {_pair(dropped.length, kept.length, 1)} tokens a "
            f"rollout, {abs(by):.0f} standard errors apart; what is trained is {trained} than what was sampled"
        )
    if (by := _apart(dropped.reward, kept.reward)) is not None:
        more, trained = ("good", "worse") if by > 0 else ("bad", "better")
        found.append(
            f"{fate}: {more} groups are dropped more than others: reward {_pair(dropped.reward, kept.reward, 3)}, "
            f"{abs(by):.0f} standard errors apart; what is trained looks {trained} than what was sampled"
        )
    return found


def _regions(tallies: Mapping[str, Mapping[str, Tally]]) -> list[str]:
    ended = {region: sum(t.groups for t in fates.values()) for region, fates in tallies.items()}
    lost = {
        region: sum(t.groups for fate, t in fates.items() if fate != CONSUMED_FATE) for region, fates in tallies.items()
    }
    found = []
    for region in sorted(tallies):
        n, others = ended[region], sum(ended.values()) - ended[region]
        if min(n, others) < FEWEST:
            continue
        here, there = lost[region] / n, (sum(lost.values()) - lost[region]) / others
        both = sum(lost.values()) / (n + others)  # 0 or 1 only when there is no difference
        error = math.sqrt(both * (1 - both) * (1 / n + 1 / others))
        if error and (here - there) / error > SIGNIFICANT:
            found.append(
                f"region {region}: its groups are dropped more than others': {here:.1%} against {there:.1%}, "
                f"{(here - there) / error:.0f} standard errors apart; what is trained is less of that region"
            )
    return found


def _apart(one: Mean, other: Mean) -> float | None:
    """How many standard errors `one` lies above `other`; None where that is not many, or not known."""
    if min(one.count, other.count) < FEWEST:
        return None
    difference, error = one.mean - other.mean, math.hypot(one.error, other.error)
    if abs(difference) <= SIGNIFICANT * error or abs(difference) < 1e-12:
        return None
    return difference / max(error, abs(difference) / 999)


def _pair(one: Mean, other: Mean, digits: int) -> str:
    return f"{one.mean:.{digits}f} ± {one.error:.{digits}f} against {other.mean:.{digits}f} ± {other.error:.{digits}f} trained"
