from __future__ import annotations

import json

import pytest

from anabranch.deploy import dead_letters
from anabranch.deploy.dead_letters import as_json, check_id, each, kind_of, list_region, render
from anabranch.schemas.errors import UsageError
from tests.groups import entry
from tests.unit.deploy.letter_boxes import HOSTILE, Box, sealed


@pytest.fixture
def box() -> Box:
    return Box()


def test_every_letter_is_a_row_and_causes_are_counted_together(box):
    ids = [box.put(f"checksum mismatch in entry east-0-aa/{n}", index=n) for n in (17, 18)]
    ids.append(box.put("no payload", {b"v": b"1"}))
    listing = list_region("east", box.letters)
    assert [row.letter_id for row in listing.rows] == ids
    assert [(row.group_index, row.producer) for row in listing.rows] == [
        ("17", "east-0-aa"),
        ("18", "east-0-aa"),
        ("-", "-"),
    ]
    assert listing.rows[0].size_bytes > len(entry(17).payload)
    lines = render({"east": listing}).splitlines()
    assert lines[1].split()[:2] == ["east", ids[0]]
    assert lines[1].endswith("checksum mismatch in entry east-0-aa/17")
    assert lines[5:8] == ["  letters  cause", "        2  checksum mismatch in entry #", "        1  no payload"]
    assert lines[-1] == "east: 3 dead letters"


def test_a_cause_is_looked_for_in_any_case(box):
    box.put("Checksum mismatch")
    box.put("envelope version 9")
    listing = list_region("east", box.letters, "CHECK")
    assert [row.cause for row in listing.rows] == ["Checksum mismatch"]
    assert render({"east": listing}).endswith("east: 2 dead letters, 1 shown")


def test_nothing_there(box):
    assert render({"east": list_region("east", box.letters)}) == "east: 0 dead letters"


def test_json(box):
    letter = box.put("checksum mismatch in entry east-0-aa/7")
    east = json.loads(as_json({"east": list_region("east", box.letters)}))["east"]
    assert (east["count"], east["made_room"], east["causes"]) == (1, 0, {"checksum mismatch in entry #": 1})
    (shown,) = east["letters"]
    assert (shown["letter"], shown["group"], shown["producer"]) == (letter, "7", "east-0-aa")


def test_what_an_entry_says_cannot_move_the_cursor(box):
    box.put("bad \x1b[2J", sealed(entry(), producer=HOSTILE, group=HOSTILE))
    shown = render({"east": list_region("east", box.letters)})
    assert all(line.isprintable() for line in shown.split("\n"))
    assert len(shown.splitlines()) == 7
    assert "owned" in shown


def test_many_letters_are_read_page_by_page(box, monkeypatch):
    ids = [box.put("x", index=n) for n in range(10)]
    monkeypatch.setattr(dead_letters, "PAGE", 4)
    letters = box.letters
    asked: list[int] = []
    listing = letters.list

    def counted(**how):
        asked.append(how["max_letters"])
        return listing(**how)

    monkeypatch.setattr(letters, "list", counted)
    assert [letter.letter_id for letter in each(letters)] == ids
    assert asked == [4, 4, 2]


def test_letters_that_come_meanwhile_are_left_alone(box):
    box.put("a")
    box.put("b")
    seen = []
    for letter in each(box.letters):
        seen.append(letter.cause)
        box.put("again")
    assert seen == ["a", "b"]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("checksum mismatch in entry east-0-aa/17", "checksum mismatch in entry #"),
        ("envelope version 9; this program reads 1", "envelope version #; this program reads #"),
        ("delivered 33 times without being settled", "delivered # times without being settled"),
    ],
)
def test_the_kind_of_a_cause(cause, kind):
    assert kind_of(cause) == kind


def test_only_ids_are_asked_for():
    assert check_id("1767225600000-0") == "1767225600000-0"
    for wrong in ("", "7", "-", "a-b", "1-2-3", "1-0 ", f"1-{10**18}", "\x1b[2J"):
        with pytest.raises(UsageError, match="names no letter"):
            check_id(wrong)
