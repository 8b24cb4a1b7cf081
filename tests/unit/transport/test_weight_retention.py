"""Retention (transport/weight_retention.py): what nobody can need goes when over budget, and nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.weight_channel import Lease
from anabranch.transport.weight_path import State, cheapest_path
from anabranch.transport.weight_retention import MANIFEST_BYTES, held_bytes, retain, surplus

LAYOUT = Layout.build([("w", "bf16", (4,))])


def at(version: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, version)


def entry(version: int, base: int | None, size: int, label: str, epoch: int = 1) -> IndexEntry:
    return IndexEntry(at(version, epoch), label, None if base is None else at(base, epoch), size, 1, f"{version:032x}")


def line(last: int, anchors: tuple[int, ...] = (0,), epoch: int = 1) -> list[IndexEntry]:
    """A chain of deltas of 10 MB up to `last`, anchors of 100 MB, and skips of 15 and 20 MB over 2 and 4."""
    found = [entry(v, None, 100 * 2**20, "anchor", epoch) for v in anchors]
    for version in range(anchors[0] + 1, last + 1):
        found.append(entry(version, version - 1, 10 * 2**20, "delta", epoch))
        for length, size in ((2, 15), (4, 20)):
            if version % length == 0 and version - length >= anchors[0]:
                found.append(entry(version, version - length, size * 2**20, f"skip{length}", epoch))
    return found


def lease(version: int, epoch: int = 1) -> Lease:
    return Lease(f"f{version}", at(version, epoch), 1000)


def test_within_the_budget_nothing_goes() -> None:
    entries = line(8)
    assert surplus(entries, at(8), [], [], held_bytes(entries)) == []
    assert surplus([], None, [], [], 0) == []


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    entries = line(8, (0, 8))
    total = held_bytes(entries)
    assert [(e.policy.version, e.label) for e in surplus(entries, at(8), [], [], total - 1)] == [(0, "anchor")]
    gone = surplus(entries, at(8), [], [], total - 130 * 2**20)
    assert [(e.policy.version, e.label) for e in gone] == [(0, "anchor"), (1, "delta"), (2, "delta"), (2, "skip2")]


def test_very_many_tiny_versions_do_not_stay_because_they_are_tiny() -> None:
    entries = [entry(0, None, 1, "anchor"), *(entry(v, v - 1, 1, "delta") for v in range(1, 2001))]
    entries.append(entry(2000, None, 1, "anchor"))
    gone = surplus(entries, at(2000), [], [], 100 * MANIFEST_BYTES)
    assert 90 < len(entries) - len(gone) <= 100


def test_the_way_from_nothing_to_the_head_stays_whatever_the_budget() -> None:
    entries = line(9, (0, 6))
    gone = surplus(entries, at(9), [], [], 0)
    left = [e for e in entries if e not in gone]
    assert [(e.policy.version, e.label) for e in cheapest_path(left, None, at(9)) or []] == [
        (6, "anchor"), (8, "skip2"), (9, "delta"),
    ]  # fmt: skip
    assert len(left) == 3


@st.composite
def channels(draw: st.DrawFn):
    """One or two epochs of versions with some anchors and skips, leases and pins anywhere."""
    last = draw(st.integers(1, 24))
    anchors = (0, *draw(st.lists(st.integers(1, last), max_size=3, unique=True)))
    entries, head = line(last, anchors), at(last)
    if draw(st.booleans()):
        first = draw(st.integers(0, last))
        entries.append(IndexEntry(at(first, 2), "fork", at(first), 0, 0, f"{first:032x}"))
        more = first + draw(st.integers(0, 6))
        entries += [entry(v, v - 1, 10 * 2**20, "delta", 2) for v in range(first + 1, more + 1)]
        head = at(more, 2)
    policies = sorted({e.policy for e in entries})
    leases = [Lease(str(p), p, 1) for p in draw(st.lists(st.sampled_from([*policies, at(99, 3)]), max_size=3))]
    pins = draw(st.lists(st.sampled_from(policies), max_size=2, unique=True))
    return draw(st.permutations(entries)), head, leases, pins


@settings(max_examples=200)
@given(channels(), st.floats(0, 1.1))
def test_what_somebody_may_need_stays_and_the_rest_goes(channel, share: float) -> None:
    entries, head, leases, pins = channel
    budget = int(held_bytes(entries) * share)
    gone = surplus(entries, head, leases, pins, budget)
    left = [e for e in entries if e not in gone]

    assert gone == sorted(gone, key=lambda e: (e.score, e.label))
    low = min((lease.policy for lease in leases), default=None)
    assert all(low is None or e.policy < low for e in gone)
    for goal in (head, *pins):
        before, after = cheapest_path(entries, None, goal), cheapest_path(left, None, goal)
        assert before is not None
        assert before == after, "the cheapest way is as it was"
        assert not any(e.policy == goal for e in gone)
    for one in leases:  # whoever holds a lease goes on as cheaply as before
        states = {e.policy: e.digest for e in entries}
        if one.policy in states:
            start = State(one.policy, states[one.policy])
            forward = [e for e in entries if e.policy > one.policy]
            assert cheapest_path([e for e in forward if e not in gone], start, head) == cheapest_path(
                forward, start, head
            )
    if gone:
        assert held_bytes(left) + held_bytes(gone[-1:]) > budget, "no more than needed"
    if held_bytes(left) > budget:
        assert surplus(left, head, leases, pins, budget) == [], "all that is allowed has gone"


def test_a_channel_comes_down_step_by_step_as_it_grows() -> None:
    """A publisher that calls `retain` after every commit: bytes stay near the budget, the head in reach."""
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    channel.put_layout(LAYOUT)
    for version in range(60):
        for e in (e for e in line(version, tuple(range(0, 60, 10))) if e.policy == at(version)):
            size = e.payload_bytes // 2**20
            base = e.base and {"epoch": 1, "version": e.base.version, "digest": f"{e.base.version:032x}"}
            chunk = {"digest": channel.blobs.put(f"{version}{e.label}".encode().ljust(size)), "size_bytes": size}
            fields = {
                "kind": e.label.rstrip("0123456789"), "run": "r", "epoch": 1, "version": version, "base": base,
                "result_digest": e.digest, "layout_hash": LAYOUT.hash, "codec": "c", "chunks": (chunk,),
                "full_bytes": 0, "changed_elements": 0, "total_elements": 0, "learner_step": 0, "fork_version": 0,
                "published_ms": 0,
            }  # fmt: skip
            channel.commit(Manifest.model_validate(fields))
        done = retain(channel, 400 + 20 * MANIFEST_BYTES)
        assert done.bytes_after == held_bytes(channel.index()) <= 400 + 20 * MANIFEST_BYTES
        assert cheapest_path(channel.index(), None, at(version))
    assert len(channel.index()) >= 15
