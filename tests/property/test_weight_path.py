"""The planner of the weight channel (transport/weight_path.py): cheapest, a chain, and short where skips make it so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_path import (
    FETCH_BYTES,
    SHORTER_MAY_COST,
    State,
    cheapest_path,
    fetch_limit,
    path_bytes,
)

MB = 2**20


def at(version: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, version)


def digest(policy: PolicyVersion) -> str:
    return f"{policy.epoch:08x}{policy.version:024x}"


def entry(
    policy: PolicyVersion, base: PolicyVersion | None, size: int = MB, label: str = "", result: str = ""
) -> IndexEntry:
    if not label:
        label = "anchor" if base is None else f"skip{policy.version - base.version}"
    return IndexEntry(policy, label, base, size, 1, result or digest(policy))


def delta(version: int, size: int = MB, epoch: int = 1) -> IndexEntry:
    return entry(at(version, epoch), at(version - 1, epoch), size, "delta")


def cost(path: Iterable[IndexEntry]) -> int:
    return sum(e.payload_bytes + FETCH_BYTES for e in path)


# Against brute force


@st.composite
def indexes(draw: st.DrawFn) -> list[IndexEntry]:
    """Up to three epochs of up to six versions; each version has some manifests or none; states repeat."""
    policies = [at(v, e) for e in range(1, draw(st.integers(1, 3)) + 1) for v in range(draw(st.integers(1, 6)))]
    states = {p: f"{draw(st.integers(0, 9)):032x}" if draw(st.booleans()) else digest(p) for p in policies}
    found: list[IndexEntry] = []
    for number, policy in enumerate(policies):
        bases = draw(st.lists(st.sampled_from([None, *policies[:number]]), unique=True, max_size=4))
        for base in bases:
            size = draw(st.sampled_from([0, 1, FETCH_BYTES, 3 * FETCH_BYTES, MB]))
            found.append(entry(policy, base, size, f"to{base}", states[policy]))
    return draw(st.permutations(found))


def every_chain(
    entries: list[IndexEntry], start: State | None, goal: PolicyVersion, tail: tuple[IndexEntry, ...] = ()
) -> Iterator[tuple[IndexEntry, ...]]:
    """All chains to `goal`, found backwards."""
    states = {e.policy: e.digest for e in entries}
    if start is not None and states.get(goal, start.digest if goal == start.policy else "") == start.digest:
        yield tail
    for e in entries:
        if e.policy == goal:
            if e.base is None:
                yield (e, *tail)
            else:
                yield from every_chain(entries, start, e.base, (e, *tail))


@settings(max_examples=400)
@given(indexes(), st.data())
def test_it_is_the_cheapest_chain_there_is(entries: list[IndexEntry], data: st.DataObject) -> None:
    policies = sorted({e.policy for e in entries}) or [at(0)]
    goal = data.draw(st.sampled_from([*policies, at(9, 3)]))
    states = {e.policy: e.digest for e in entries}
    origin = data.draw(st.sampled_from([None, *policies, at(7), at(0, 4)]))
    held = None if origin is None else data.draw(st.sampled_from([states.get(origin, digest(origin)), "f" * 32]))
    start = None if origin is None or held is None else State(origin, held)

    # What lies beyond the goal does not lead to it, but may say that it has the state at hand.
    chains = list(every_chain([e for e in entries if e.policy <= goal], start, goal))
    path = cheapest_path(entries, start, goal)
    if not chains:
        assert path is None
        return
    assert path is not None
    assert tuple(path) in chains
    cheapest = min(map(cost, chains))
    assert cost(path) <= SHORTER_MAY_COST * cheapest
    assert cost(path) <= min(cost(chain) for chain in chains if len(chain) <= len(path))


@given(st.integers(1, 40), st.integers(0, 12), st.randoms(use_true_random=False))
def test_without_a_better_way_it_is_the_chain(last: int, behind: int, rng: random.Random) -> None:
    entries = [entry(at(0), None), *(delta(v) for v in range(1, last + 1))]
    rng.shuffle(entries)
    first = max(0, last - behind)
    path = cheapest_path(entries, State(at(first), digest(at(first))), at(last))
    assert path == [delta(v) for v in range(first + 1, last + 1)]


# Skips: the table of the channel's issue, at most 2·log2 n + 2 fetches


def union_model(length: int, rng: random.Random) -> int:
    """A step changes 1 % of 270 MB at a byte each; steps overlap, so long skips saturate."""
    return int(270 * MB * (1 - 0.99**length) * 0.5 * rng.uniform(0.9, 1.1))


def disjoint_steps(length: int, rng: random.Random) -> int:
    """Nothing is saved: a skip is exactly as large as what it merges."""
    return length * MB


def worse_than_parts(length: int, rng: random.Random) -> int:
    """A skip is a fifth larger than what it merges, but for single steps."""
    return int(length * MB * (1 if length == 1 else 1.2))


def tiny_model(length: int, rng: random.Random) -> int:
    """Manifests cost more than what they carry."""
    return rng.randrange(200)


TOP = 2100


def with_skips(size: Callable[[int, random.Random], int], rng: random.Random, levels: int = 10) -> list[IndexEntry]:
    """Versions 0 to TOP with all aligned skips; anchors are far too dear."""
    entries = [entry(at(0), None, 10**12)]
    for version in range(1, TOP + 1):
        entries.append(delta(version, size(1, rng)))
        for level in range(1, levels + 1):
            if version % 2**level == 0:
                entries.append(entry(at(version), at(version - 2**level), size(2**level, rng)))
    return entries


@pytest.mark.parametrize("model", [union_model, disjoint_steps, worse_than_parts, tiny_model])
def test_a_follower_n_versions_behind_fetches_few_entries(model: Callable[[int, random.Random], int]) -> None:
    rng = random.Random(7)
    entries = with_skips(model, rng)
    cases = [(n, TOP) for n in (1, 2, 3, 63, 64, 65, 511, 1000)]
    cases += [(n, 1023 + n // 2) for n in (2, 510, 1000)]  # across the middle: the most pieces
    cases += [(rng.randint(1, 1000), rng.randint(1000, TOP)) for _ in range(25)]
    for n, last in cases:
        start = at(last - n)
        path = cheapest_path(entries, State(start, digest(start)), at(last))
        assert path is not None
        assert len(path) <= 2 * math.log2(n) + 2, (n, last)
        assert sum(e.policy.version - e.base.version for e in path if e.base) == n
        assert [e.base for e in path] == [start, *(e.policy for e in path[:-1])]
        plain = sum(e.payload_bytes for e in entries if e.label == "delta" and start < e.policy <= at(last))
        assert path_bytes(path) <= (1.25 if model is worse_than_parts else 1) * plain + FETCH_BYTES * n


def test_a_newcomer_pays_an_anchor_and_few_skips() -> None:
    rng = random.Random(8)
    entries = [*with_skips(union_model, rng), entry(at(777), None, 270 * MB), entry(at(1500), None, 270 * MB)]
    path = cheapest_path(entries, None, at(TOP))
    assert path is not None
    assert path[0] == entry(at(1500), None, 270 * MB)
    assert len(path) <= fetch_limit(path) <= 2 * math.log2(600) + 2


def test_fetches_are_not_saved_at_any_price() -> None:
    """Skips that cost far more than what they merge, and an anchor, are left alone."""
    entries = [entry(at(0), None, 100 * MB), *(delta(v) for v in range(1, 65)), entry(at(64), None, 1000 * MB)]
    entries += [entry(at(v), at(v - 8), 20 * MB) for v in range(8, 65, 8)]
    path = cheapest_path(entries, State(at(0), digest(at(0))), at(64))
    assert path == [delta(v) for v in range(1, 65)]


def test_missing_skips_are_made_up_for_by_what_is_there() -> None:
    """The newest skips are still being made."""
    rng = random.Random(9)
    entries = [e for e in with_skips(union_model, rng) if e.label == "delta" or e.policy.version <= 2000]
    path = cheapest_path(entries, State(at(1100), digest(at(1100))), at(2003))
    assert path is not None
    assert [e.label for e in path[-3:]] == ["delta"] * 3
    assert len(path) <= 2 * math.log2(900) + 2 + 3


# Epochs


def two_lines() -> list[IndexEntry]:
    """Epoch 1 went to 9; epoch 2 forked from 6 and went to 8."""
    fork = entry(at(6, 2), at(6), 0, "fork", digest(at(6)))
    return [entry(at(0), None, 50 * MB), *(delta(v) for v in range(1, 10)), fork, *(delta(v, epoch=2) for v in (7, 8))]


def test_a_follower_before_the_fork_goes_over_it() -> None:
    path = cheapest_path(two_lines(), State(at(4), digest(at(4))), at(8, 2))
    assert path is not None
    assert [str(e.policy) for e in path] == ["e1.v5", "e1.v6", "e2.v6", "e2.v7", "e2.v8"]


def test_a_follower_at_the_fork_is_there_already_by_its_digest() -> None:
    assert cheapest_path(two_lines(), State(at(6), digest(at(6))), at(6, 2)) == []
    path = cheapest_path(two_lines(), State(at(6), digest(at(6))), at(8, 2))
    assert path == [delta(7, epoch=2), delta(8, epoch=2)]


def test_a_follower_beyond_the_fork_begins_anew() -> None:
    """It took versions that were given up: no delta leads back."""
    entries = two_lines()
    path = cheapest_path(entries, State(at(9), digest(at(9))), at(8, 2))
    assert path == cheapest_path(entries, None, at(8, 2))
    assert path is not None
    assert path[0].label == "anchor"
    assert cheapest_path([e for e in entries if e.label != "anchor"], State(at(9), digest(at(9))), at(8, 2)) is None


def test_going_back_is_a_path_from_nothing() -> None:
    path = cheapest_path(two_lines(), State(at(9), digest(at(9))), at(3))
    assert path is not None
    assert [e.label for e in path] == ["anchor", "delta", "delta", "delta"]


def test_equal_version_numbers_with_other_weights_are_no_base() -> None:
    """A state that calls itself e1.v4 and is not the channel's e1.v4: a hub that lost its data and began again."""
    path = cheapest_path(two_lines(), State(at(4), "f" * 32), at(5))
    assert path is not None
    assert path[0].label == "anchor"


def test_a_version_that_left_the_index_is_trusted_by_its_name() -> None:
    """Whoever follows such a path finds the base digest on the manifest, and refuses it if it is another."""
    entries = [e for e in two_lines() if e.policy > at(4)]
    assert cheapest_path(entries, State(at(4), digest(at(4))), at(5)) == [delta(5)]
    assert cheapest_path(entries, State(at(3), digest(at(3))), at(5)) is None


def test_a_state_that_comes_again_needs_no_path() -> None:
    """A step that changed nothing, learning rate 0: the later version has the state at hand too."""
    entries = [*two_lines()[:4], entry(at(4), at(3), 100, "delta", digest(at(3))), delta(5)]
    assert cheapest_path(entries, State(at(3), digest(at(3))), at(4)) == []
    assert cheapest_path(entries, State(at(3), digest(at(3))), at(5)) == [delta(5)]


def test_nothing_leads_to_what_is_not_there() -> None:
    assert cheapest_path([], None, at(0)) is None
    assert cheapest_path(two_lines(), None, at(99)) is None
    assert cheapest_path([], State(at(3), digest(at(3))), at(3)) == []
