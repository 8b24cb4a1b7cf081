"""`anabranch permits`: which group indices are out, with whom, and how far the bound is.

Invariant: every index below `next` is in one of the lines shown: arrived, leased, expired, returned or abandoned. Held by
tests/unit/deploy/test_permits_state.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from anabranch.deploy.plain_text import plain
from anabranch.transport.permits import PermitState

UNKNOWN_REGION = "?"


def region_of(producer: str, reported: Mapping[str, str], regions: Collection[str]) -> str:
    """By its status on the hub, else by its id, which begins with the region's name (a name may hold dashes)."""
    if producer in reported:
        return reported[producer]
    fitting = [region for region in regions if producer.startswith(f"{region}-")]
    return max(fitting, key=len, default=UNKNOWN_REGION)


def arrived(state: PermitState) -> int:
    """Indices handed out that neither run, nor wait to be handed out again, nor are given up."""
    return state.next_index - sum(state.leased.values()) - state.expired - state.returned - state.abandoned


def by_region(state: PermitState, reported: Mapping[str, str], regions: Collection[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for producer, groups in state.leased.items():
        counts[region_of(producer, reported, regions)] += groups
    return dict(sorted(counts.items()))


def render(run: str, state: PermitState, reported: Mapping[str, str], regions: Collection[str]) -> str:
    if state.epoch is None:
        return f"no learner has opened run {run}: no permits are handed out"
    left = max(0, state.limit - state.next_index)
    rows = [
        (state.next_index, "indices handed out"),
        (arrived(state), "arrived at the learner"),
        (sum(state.leased.values()), "leased: being sampled, or on their way"),
        (state.expired, "of a lease that ran out: handed out next"),
        (state.returned, "returned: handed out again"),
        (state.abandoned, "abandoned: given up producer.max_attempts times; other indices take their places"),
        (left, f"new ones may be handed out, below the limit {state.limit:,}"),
    ]
    lines = [f"epoch {state.epoch}, version {state.version}", *(f"{count:>12,}  {what}" for count, what in rows)]
    if not left and not state.returned and not state.expired:
        lines.append(
            "the bound is reached: a producer that asks waits for the learner's next version, or for the run's end"
        )
    if state.leased:
        lines += ["", f"{'region':<12} {'producer':<36} {'leased':>7}"]
        named = sorted((region_of(p, reported, regions), p, n) for p, n in state.leased.items())
        lines += [f"{region:<12} {plain(producer, 36):<36} {groups:>7,}" for region, producer, groups in named]
    return "\n".join(lines)


def as_json(state: PermitState, reported: Mapping[str, str], regions: Collection[str]) -> str:
    value: dict[str, Any] = {
        "epoch": state.epoch,
        "version": state.version,
        "next": state.next_index,
        "limit": state.limit,
        "arrived": arrived(state),
        "leased": dict(state.leased),
        "leased_by_region": by_region(state, reported, regions),
        "expired": state.expired,
        "returned": state.returned,
        "abandoned": state.abandoned,
    }
    return json.dumps(value, indent=2)
