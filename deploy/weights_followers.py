"""`anabranch weights followers`: which version each producer serves, how it got there, and what went wrong last.

Invariant: the table holds every producer that reports, and every lease, also one whose holder does not report (any more).
Held by tests/unit/deploy/test_weights_followers.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from anabranch.deploy.weights_versions import NOTHING, age_text, head_or_fault
from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import RunBoard
from anabranch.transport.weight_channel import Lease, WeightChannel


@dataclass(frozen=True, slots=True)
class Follower:
    """`status` None: a lease whose holder does not report. `behind`: versions published since the one it serves, None if
    it serves none."""

    name: str
    status: ProducerStatus | None
    behind: int | None
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Head:
    """`fault`: why it cannot be read, else "". `policy` None: nothing is published yet, or a fault."""

    policy: PolicyVersion | None
    fault: str = ""


def read_followers(channel: WeightChannel, runs: RunBoard) -> tuple[Head, list[Follower]]:
    """The head, and the followers by name. Raises StreamUnavailableError."""
    head, fault = head_or_fault(channel)
    published = sorted({entry.policy for entry in channel.index()})
    leases = {lease.holder: lease for lease in channel.leases()}
    statuses = runs.producers()
    return Head(head, fault), [
        Follower(name, statuses.get(name), _behind(statuses.get(name), published, head), leases.get(name))
        for name in sorted(statuses.keys() | leases.keys())
    ]


def _behind(status: ProducerStatus | None, published: list[PolicyVersion], head: PolicyVersion | None) -> int | None:
    """In one epoch by the numbers, since retention may have dropped versions in between; else those on the channel."""
    served = _served(status)
    if served is None or head is None:
        return None
    if served.epoch == head.epoch:
        return max(0, head.version - served.version)
    return sum(policy > served for policy in published)


def _served(status: ProducerStatus | None) -> PolicyVersion | None:
    try:
        return PolicyVersion.parse(status.policy) if status else None
    except TrajectoryError:  # '' before the first version
        return None


def as_json(run: str, head: Head, followers: list[Follower]) -> dict[str, Any]:
    return {
        "run": run,
        "head": None if head.policy is None else str(head.policy),
        "head_error": head.fault or None,
        "followers": [_json_of(f) for f in followers],
    }


def _json_of(f: Follower) -> dict[str, Any]:
    s = f.status
    told: dict[str, Any] = {"producer": f.name, "reports": s is not None}
    if s is not None:
        told |= {
            "region": s.region,
            "state": s.state,
            "version": s.policy or None,
            "served_since_ms": s.served_since_ms or None,
            "versions_behind": f.behind,
            "following": s.following or None,
            "own_weights": s.own_weights or None,
            "last_error": s.last_error or None,
            "bytes_fetched": s.fetched_bytes,
            "last_bytes_fetched": s.last_fetched_bytes,
            "path": s.last_path,
            "publish_to_serve_ms": s.publish_to_serve_ms,
            "swap_pause_ms": s.last_swap_pause_ms,
        }
    told["lease"] = (
        None if f.lease is None else {"version": str(f.lease.policy), "expires_in_ms": f.lease.expires_in_ms}
    )
    return told


def render(run: str, head: Head, followers: list[Follower], *, now_ms: int | None = None) -> str:
    now = now_ms if now_ms is not None else time.time_ns() // 1_000_000
    shown = NOTHING.format(run=run) if head.policy is None else f"head {head.policy}"
    lines = ["head: not readable" if head.fault else shown, ""]
    if not followers:
        return "\n".join([*lines, "no producer reports, and nobody holds a lease"])
    lines.append(
        f"{'producer':<28} {'serves':<12} {'since':>7} {'behind':>6} {'fetched':>15} {'last':>13} {'publish-serve':>13}  "
        f"{'lease':<16} path"
    )
    lines += [_row(f, now) for f in followers]
    for heading, told in (
        ("last errors", {f.name: f.status.last_error for f in followers if f.status}),
        ("a copy of the weights of its own", {f.name: f.status.own_weights for f in followers if f.status}),
    ):
        if any(told.values()):
            lines += ["", heading, *(f"{name}: {what}" for name, what in told.items() if what)]
    return "\n".join(lines)


def _row(f: Follower, now_ms: int) -> str:
    lease = f"{f.lease.policy}, {f.lease.expires_in_ms / 1000:.0f} s" if f.lease else "-"
    s = f.status
    if s is None:
        return f"{f.name:<28} {'does not report':<81}  {lease:<16}"
    since = age_text((now_ms - s.served_since_ms) / 1000) if s.served_since_ms else "-"
    behind = "-" if f.behind is None else str(f.behind)
    return (
        f"{f.name:<28} {s.policy or '-':<12} {since:>7} {behind:>6} {s.fetched_bytes:>15,} "
        f"{s.last_fetched_bytes:>13,} {s.publish_to_serve_ms:>10,.0f} ms  {lease:<16} {s.last_path or '-'}"
    )
