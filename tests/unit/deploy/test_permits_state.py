from __future__ import annotations

import json

from anabranch.deploy.permits_state import arrived, as_json, by_region, render
from anabranch.transport.permits import PermitState

REGIONS = ("east", "east-2", "west")
STATE = PermitState(
    epoch=3, version=10, next_index=100, limit=96 + 5, leased={"east-0-aa": 4, "east-2-1-bb": 2, "p\x1b": 1},
    expired=2, returned=3, abandoned=1,
)  # fmt: skip


def test_every_index_handed_out_is_in_one_line():
    assert arrived(STATE) + 7 + 2 + 3 + 1 == 100
    shown = render("r", STATE, {}, REGIONS)
    assert [int(line.split()[0]) for line in shown.splitlines()[1:8]] == [100, 87, 7, 2, 3, 1, 1]
    assert "epoch 3, version 10" in shown
    assert "bound" not in shown


def test_a_region_is_that_of_the_status_or_that_of_the_id():
    assert by_region(STATE, {}, REGIONS) == {"?": 1, "east": 4, "east-2": 2}
    assert by_region(STATE, {"p\x1b": "west"}, REGIONS) == {"east": 4, "east-2": 2, "west": 1}


def test_the_bound_is_told_when_it_is_reached():
    def full(**changes: int) -> str:
        values = {"limit": 100, "returned": 0, "expired": 0} | changes
        return render("r", PermitState(1, 0, 100, leased={}, abandoned=0, **values), {}, REGIONS)

    assert "the bound is reached" in full()
    for more in ("limit", "returned", "expired"):
        assert "the bound is reached" not in full(**{more: 101})


def test_no_learner_has_opened_the_run():
    shown = render("r", PermitState(None, 0, 0, 0, {}, 0, 0, 0), {}, REGIONS)
    assert shown == "no learner has opened run r: no permits are handed out"


def test_names_cannot_move_the_cursor():
    assert "\x1b" not in render("r", STATE, {}, REGIONS)


def test_json():
    value = json.loads(as_json(STATE, {}, REGIONS))
    assert value["leased"] == dict(STATE.leased)
    assert value["leased_by_region"] == {"?": 1, "east": 4, "east-2": 2}
    counts = {
        name: value[name]
        for name in ("epoch", "version", "next", "limit", "arrived", "expired", "returned", "abandoned")
    }
    assert counts == {
        "epoch": 3, "version": 10, "next": 100, "limit": 101, "arrived": 87, "expired": 2, "returned": 3, "abandoned": 1,
    }  # fmt: skip
