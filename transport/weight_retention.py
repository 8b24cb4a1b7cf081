"""What may go from the weight channel: what nobody can need, when it is over its budget of bytes; nothing else.

Invariant: every entry at or above the lowest lease stays, and so do those of the head and of pinned versions and the
cheapest paths that lead to them from nothing. So no follower that holds a lease ever finds its way gone, and a new one
always has a way to the head. A manifest counts `MANIFEST_BYTES` beside its chunks, so that a run of very many tiny versions
stays within bounds too: hub, followers and planners carry an index that holds at most budget / `MANIFEST_BYTES` entries
which nobody needs. Held by tests/unit/transport/test_weight_retention.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import Lease, WeightChannel
from anabranch.transport.weight_rules import needed

MANIFEST_BYTES = 2**14  # the hub's memory for a manifest, its entry and counters; and what an entry costs who plans


@dataclass(frozen=True, slots=True)
class Retained:
    """What `retain` did; bytes as `held_bytes` counts them. `held_by`: when still over budget, the leases without which
    more could have gone."""

    dropped: list[IndexEntry]
    bytes_before: int
    bytes_after: int
    held_by: list[Lease]


def held_bytes(entries: Iterable[IndexEntry]) -> int:
    """What `entries` count against the budget: payload, and `MANIFEST_BYTES` each."""
    return sum(entry.payload_bytes + MANIFEST_BYTES for entry in entries)


def surplus(
    entries: Iterable[IndexEntry],
    head: PolicyVersion | None,
    leases: Iterable[Lease],
    pins: Collection[PolicyVersion],
    retain_bytes: int,
) -> list[IndexEntry]:
    """Entries to drop, oldest first, just enough of them to come down to `retain_bytes`, as far as that is allowed."""
    known = sorted(entries, key=lambda e: (e.score, e.label))
    excess = held_bytes(known) - retain_bytes
    if excess <= 0:
        return []
    gone: list[IndexEntry] = []
    for entry in _free(known, head, leases, pins):
        if excess <= 0:
            break
        gone.append(entry)
        excess -= held_bytes([entry])
    return gone


def retain(channel: WeightChannel, retain_bytes: int, *, spare: float = 0.0) -> Retained:
    """Drop what `surplus` names from `channel`, as far as nobody has come to need it meanwhile. When it is over
    `retain_bytes` it comes down to 1 − `spare` of that, so that whoever calls this often has it do something seldom."""
    entries, head, leases, pins = channel.index(), channel.head(), channel.leases(), channel.pins()
    before = held_bytes(entries)
    if before <= retain_bytes:
        return Retained([], before, before, [])
    wanted = surplus(entries, head, leases, pins, int(retain_bytes * (1 - spare)))
    dropped = channel.drop(wanted) if wanted else []
    after = before - held_bytes(dropped)
    held_by: list[Lease] = []
    if after > retain_bytes:
        gone = set(dropped)
        left = [e for e in entries if e not in gone]
        free = _free(left, head, (), pins)
        held_by = sorted(
            (lease for lease in leases if any(e.policy >= lease.policy for e in free)), key=lambda lease: lease.policy
        )
    return Retained(dropped, before, after, held_by)


def _free(
    known: Sequence[IndexEntry],
    head: PolicyVersion | None,
    leases: Iterable[Lease],
    pins: Collection[PolicyVersion],
) -> list[IndexEntry]:
    """Those of `known` that nothing protects."""
    kept = needed(known, head, pins)
    protected = {*pins, head}
    low = min((lease.policy for lease in leases), default=None)
    return [
        e
        for e in known
        if e not in kept
        and e.policy not in protected
        and (head is None or e.policy < head)
        and (low is None or e.policy < low)
    ]
