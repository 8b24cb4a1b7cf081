"""The ledger, and how dropped groups differ from trained ones, for a person or a program.

Invariant: what is shown is what was counted; every term of the equation has its line. Pure.
Held by tests/unit/deploy/test_ledger_show.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from anabranch.consumers.drops import CONSUMED_FATE, FEWEST, SIGNIFICANT, Mean, Tally, comparable, everywhere
from anabranch.consumers.ledger_check import difference
from anabranch.deploy.ledger_look import Ledgers, RegionLedger
from anabranch.deploy.plain_text import plain
from anabranch.deploy.weights_versions import age_text
from anabranch.schemas.metrics import RegionCounts
from anabranch.transport.stream import GroupLag, LedgerCounts

Row = tuple[str, str, str]


def render(ledgers: Ledgers, *, now_ms: int | None = None) -> str:
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    rows: list[Row] = [("region", "groups", "")]
    for name in sorted({*ledgers.asked.answers, *ledgers.asked.away}):
        if (region := ledgers.asked.answers.get(name)) is not None:
            rows += _answered(name, region)
        else:
            rows += _away(name, ledgers.last.get(name), now_ms)
    rows += [("", "", f"learner: {plain(alarm)}") for alarm in ledgers.alarms]
    return "\n".join(f"{a:<12} {b:>10}  {c}".rstrip() for a, b, c in rows)


def as_plain(ledgers: Ledgers) -> dict[str, Any]:
    """For JSON: region -> its ledger, or why it is not known."""
    shown: dict[str, Any] = {}
    for name, region in ledgers.asked.answers.items():
        counts = region.counts
        shown[name] = _terms(counts) | {
            "balanced": counts.balanced,
            "too_many": difference(counts),
            "groups": [asdict(group) for group in region.groups],
        }
    for name, error in ledgers.asked.away.items():
        last = ledgers.last.get(name)
        shown[name] = {"unreachable": plain(str(error)), "last": None if last is None else last.model_dump()}
    return dict(sorted(shown.items()))


def _terms(counts: LedgerCounts) -> dict[str, Any]:
    return {
        "produced": counts.produced,
        "foreign": counts.foreign,
        "pending": counts.pending,
        "fates": dict(sorted(counts.fates.items())),
    }


def _answered(name: str, region: RegionLedger) -> list[Row]:
    rows, off = _equation(name, region.counts), difference(region.counts)
    if off:
        a, b, c = rows[-1]
        many = f"{off:,} too many" if off > 0 else f"{-off:,} missing"
        rows[-1] = (a, b, f"{c}   DOES NOT BALANCE: {many}")
    return rows + [("", "", _lag(group)) for group in region.groups]


def _away(name: str, last: RegionCounts | None, now_ms: int) -> list[Row]:
    if last is None:
        return [(name, "?", "cannot be reached, and no learner says what it counted there")]
    counts = LedgerCounts(last.produced, last.pending, last.fates, last.foreign)
    ago = age_text((now_ms - last.at_ms) / 1000)
    return [(name, "?", f"cannot be reached; the learner counted {ago} ago:"), *_equation("", counts)]


def _equation(name: str, counts: LedgerCounts) -> list[Row]:
    rows = [(name, f"{counts.produced:,}", "produced")]
    if counts.foreign:
        rows.append(("", f"{counts.foreign:,}", "+ foreign: entries that no producer appended"))
    for number, (fate, n) in enumerate(sorted(counts.fates.items())):
        rows.append(("", f"{n:,}", f"{'+' if number else '='} {plain(fate, 60)}"))
    rows.append(("", f"{counts.pending:,}", f"{'+' if counts.fates else '='} pending"))
    return rows


def _lag(group: GroupLag) -> str:
    return (
        f"  group {plain(group.name, 20)}: {group.undelivered:,} not read, {group.pending:,} read and not acknowledged"
    )


HEADING = f"{'region':<12} {'fate':<22} {'groups':>9} {'tokens a rollout':>18} {'cut':>7} {'age':>6} {'reward':>16}"

ALIKE = f"Dropped groups do not differ from trained ones by more than {SIGNIFICANT:g} standard errors."
TOO_FEW = f"Too few to compare: it takes {FEWEST} trained groups, and {FEWEST} that were dropped for one cause."


def render_drops(tallies: Mapping[str, Mapping[str, Tally]], verdicts: list[str]) -> str:
    """Lengths and rewards with their standard errors; cut: share of rollouts that ended at sampling.max_tokens."""
    if not tallies:
        return "no group has ended yet"
    lines = [HEADING]
    regions = dict(sorted(tallies.items()))
    for region, fates in {**(regions if len(regions) > 1 else {}), "all": everywhere(tallies)}.items():
        shown = region if len(regions) > 1 else next(iter(regions))
        for fate in sorted(fates, key=lambda f: (f != CONSUMED_FATE, f)):
            one = fates[fate]
            lines.append(
                f"{plain(shown, 12):<12} {_fate(fate):<22} {one.groups:>9,} {_mean(one.length, 1):>18} {one.cut_share:>7.1%} "
                f"{one.age.mean:>6.2f} {_mean(one.reward, 3):>16}"
            )
            shown = ""
    said = verdicts or [ALIKE if comparable(tallies) else TOO_FEW]
    return "\n".join([*lines, "", *said])


def drops_as_plain(tallies: Mapping[str, Mapping[str, Tally]], verdicts: list[str]) -> dict[str, Any]:
    def of(fates: Mapping[str, Tally]) -> dict[str, Any]:
        return {_fate(fate): _figures(one) for fate, one in sorted(fates.items())}

    regions = {region: of(fates) for region, fates in sorted(tallies.items())}
    return {"regions": regions, "all": of(everywhere(tallies)), "verdicts": verdicts}


def _figures(one: Tally) -> dict[str, Any]:
    def error(mean: Mean) -> float | None:
        return None if math.isnan(mean.error) else mean.error

    return {
        "groups": one.groups, "rollouts": one.rollouts, "cut_share": one.cut_share,
        "tokens_per_rollout": one.length.mean, "tokens_per_rollout_error": error(one.length),
        "age": one.age.mean, "reward": one.reward.mean, "reward_error": error(one.reward),
    }  # fmt: skip


def _fate(fate: str) -> str:
    return "trained" if fate == CONSUMED_FATE else plain(fate, 22)


def _mean(mean: Mean, digits: int) -> str:
    return f"{mean.mean:.{digits}f}" + ("" if math.isnan(mean.error) else f" ± {mean.error:.{digits}f}")
