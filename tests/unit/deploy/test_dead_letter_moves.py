from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.deploy.dead_letter_moves import (
    Knowledge,
    choose_all,
    choose_named,
    drop,
    find,
    outlook,
    preview,
    requeue,
)
from anabranch.schemas.errors import UsageError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.dead_letters import DeadLetter
from tests.groups import entry
from tests.unit.deploy.letter_boxes import HOSTILE, RUN, Box, sealed

KNOWN = Knowledge(RUN, 2**20, max_age=2, version=PolicyVersion(1, 2), trained=frozenset({3}))


@pytest.fixture
def box() -> Box:
    return Box()


def letter(fields: dict[bytes, bytes]) -> DeadLetter:
    box = Box()
    found = box.letters.get(box.put("because", fields))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (KNOWN, "the learner reads it"),
        (replace(KNOWN, trained=None), "the learner reads it; dropped:duplicate if its index has been trained"),
        (replace(KNOWN, trained={7}), "dropped:duplicate: its index has been trained"),
        (replace(KNOWN, version=PolicyVersion(2, 3)), "dropped:age: sampled by v0, the learner is at e2.v3"),
        (
            replace(KNOWN, version=PolicyVersion(2, 3), trained={7}),
            "dropped:age: sampled by v0, the learner is at e2.v3",
        ),
        (replace(KNOWN, finished="all steps done"), "nobody reads it: the run is over (all steps done)"),
        (replace(KNOWN, run="other"), "set aside again: payload is of run 'run', group 7"),
        (replace(KNOWN, max_entry_bytes=10), "set aside again: entry of"),
    ],
)
def test_what_will_happen(known, told):
    said = outlook(letter(sealed(entry(7))), known)
    assert said.startswith(told)
    assert said == told or told.endswith("entry of")


def test_what_cannot_be_read_comes_back():
    assert outlook(letter(sealed(entry(7), xxh3=b"0")), KNOWN).startswith("set aside again: checksum mismatch")
    assert outlook(letter(sealed(entry(7), v=HOSTILE)), KNOWN).isprintable()


def test_a_letter_without_an_entry_stays(box):
    letter_id = box.put("its data was deleted", {})
    choice = choose_named({"east": box.letters}, [letter_id], KNOWN)
    assert "drop it" in choice.chosen[0].outlook
    assert choice.rows == []
    assert [row.letter_id for row in choose_named({"east": box.letters}, [letter_id]).rows] == [letter_id]


def test_what_another_group_set_aside_is_foreign(box):
    box.put("a")
    box.stream.read("recorder", "c", max_entries=0, block_ms=0)
    (delivery,) = box.stream.read("recorder", "c", max_entries=1, block_ms=0)
    box.stream.dead_letter("recorder", delivery, "not for Parquet")
    _, recorders = choose_all({"east": box.letters}, "", KNOWN).chosen
    assert recorders.outlook == "the learner reads it; a foreign entry, since recorder set it aside"


def test_a_letter_is_put_back_once(box):
    first, second = box.put("a", index=7), box.put("b", index=8)
    regions = {"east": box.letters, "west": Box().letters}
    choice = choose_named(regions, [second, second, "99-0"], KNOWN)
    assert [one.row.letter_id for one in choice.chosen] == [second]
    assert choice.missing == ["99-0"]
    rows = choice.rows
    moved = requeue(regions, rows)
    (delivery,) = box.stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    assert moved.entries == {("east", second): delivery.entry_id}
    assert delivery.fields == sealed(entry(8, producer="east-0-aa"))
    assert [one.letter_id for one in box.letters.list()] == [first]
    again = requeue(regions, rows)
    assert (again.entries, [row.letter_id for row in again.gone]) == ({}, [second])


def test_all_of_a_cause_are_dropped_in_every_region(box):
    west = Box()
    box.put("checksum")
    kept = box.put("other")
    west.put("Checksum")
    regions = {"east": box.letters, "west": west.letters}
    choice = choose_all(regions, "checksum")
    assert {one.outlook for one in choice.chosen} == {""}
    told: list[int] = []
    moved = drop(regions, choice.rows, told.append)
    assert told == [1, 2]
    assert set(moved.entries.values()) == {""}
    assert [one.letter_id for one in box.letters.list()] == [kept]
    assert west.letters.count() == 0


def test_a_letter_of_two_regions_needs_a_region(box):
    west = Box()
    letter_id = box.put("a")
    assert west.put("a") == letter_id  # the twins count alike
    regions = {"east": box.letters, "west": west.letters}
    with pytest.raises(UsageError, match="is in east and in west: give --region"):
        find(regions, letter_id)
    found = find({"west": west.letters}, letter_id)
    assert found is not None
    assert found[0] == "west"


def test_the_preview(box):
    box.put("because", index=7)
    box.put("because", index=3)
    choice = choose_all({"east": box.letters}, "", KNOWN)
    lines = preview(choice, outlooks=True).splitlines()
    assert lines[1].endswith("the learner reads it")
    assert lines[2].endswith("dropped:duplicate: its index has been trained")
    assert preview(choice, outlooks=False).splitlines()[1].endswith("because")
