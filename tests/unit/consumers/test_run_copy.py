"""What is copied into a store and what goes from it, as a decision over both places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.consumers.run_copy import Held, lacking, plan

EAST = "trajectories/run=run/epoch=1/day=2026-01-01/region=east"
STEP = "steps/epoch=1/000004"


def part(first: int, last: int | None = None, *, merged: bool = False) -> str:
    return f"{EAST}/{first}-0_{first if last is None else last}-0{'.merged' if merged else ''}.parquet"


def files(*names: str, bytes_: int = 10, changed_ms: int = 5) -> dict[str, Held]:
    return {name: Held(bytes_, changed_ms) for name in names}


def keys(units: object) -> list[str]:
    return [unit.key for unit in units]  # type: ignore[attr-defined]


def test_what_is_missing_or_has_grown_is_copied_oldest_first():
    here = files(part(3), part(1), part(2), f"{STEP}/rank-0.parquet", f"{STEP}/facts.json")
    there = files(part(2)) | files(part(3), bytes_=4)
    made = plan(here, there, retain_bytes=0)
    assert keys(made.copy) == [part(1), part(3), STEP]
    assert lacking(made.copy[2], here, there) == [f"{STEP}/rank-0.parquet", f"{STEP}/facts.json"], "facts last"
    assert (made.drop, made.idle) == ([], set())


def test_a_step_without_facts_is_not_copied_and_is_rubbish_there():
    torn = files(f"{STEP}/rank-0.parquet")
    assert plan(torn, {}, retain_bytes=0).copy == []
    assert plan({}, torn, retain_bytes=0).idle == set(torn)
    whole = torn | files(f"{STEP}/facts.json")
    made = plan(whole, torn, retain_bytes=0)
    assert keys(made.copy) == [STEP]
    assert made.idle == set(), "it is about to be completed"


def test_parts_stay_until_the_merged_one_is_there():
    parts, merged = files(part(1), part(2)), files(part(1, 2, merged=True))
    made = plan(merged, parts, retain_bytes=0)
    assert keys(made.copy) == [part(1, 2, merged=True)]
    assert made.idle == set()
    assert plan(merged, parts | merged, retain_bytes=0).idle == set(parts)
    assert plan(parts | merged, {}, retain_bytes=0).copy == made.copy, "parts are not copied any more"
    assert plan(parts, merged, retain_bytes=0).copy == [], "nor where the merged one is there alone"


def test_a_run_directory_that_was_lost_costs_nothing_in_the_store():
    there = files(part(1), part(2), f"{STEP}/rank-0.parquet", f"{STEP}/facts.json")
    made = plan({}, there, retain_bytes=0)
    assert (made.copy, made.drop, made.idle) == ([], [], set())


def test_the_oldest_beyond_the_budget_go_and_are_not_copied_again():
    here, there = files(part(2), part(3), part(4)), files(part(1), part(2))
    made = plan(here, there, retain_bytes=25)
    assert keys(made.drop) == [part(1), part(2)]
    assert keys(made.copy) == [part(3), part(4)]
    again = plan(here, files(part(3), part(4)), retain_bytes=1000, given_up=made.given_up)
    assert (again.copy, again.drop) == ([], []), "room for what was given up does not bring it back"
    left = plan(here, there, retain_bytes=1000, given_up=made.given_up)
    assert keys(left.drop) == [part(2)], "which a store that was away then still has"


def test_other_names_are_passed_over():
    others = files("metrics.jsonl", "blobs/ab/abcd", "steps/x", "steps/epoch=1/4/facts.json", f"{EAST}/1-0_2-0.tmp")
    made = plan(others, others, retain_bytes=1)
    assert (made.copy, made.drop, made.idle) == ([], [], set())


@given(
    st.dictionaries(st.integers(1, 20), st.integers(1, 9)),
    st.dictionaries(st.integers(1, 20), st.integers(1, 9)),
    st.integers(1, 60),
)
def test_a_second_plan_finds_nothing_to_do(here: dict[int, int], there: dict[int, int], retain: int):
    mine = {part(i): Held(size, 1) for i, size in here.items()}
    theirs = {part(i): Held(size, 1) for i, size in there.items()}
    first = plan(mine, theirs, retain_bytes=retain)
    for unit in first.copy:
        theirs |= {name: mine[name] for name in unit.names}
    for unit in first.drop:
        for name in unit.names:
            del theirs[name]
    second = plan(mine, theirs, retain_bytes=retain, given_up=first.given_up)
    assert (second.copy, second.drop, second.idle) == ([], [], set())
