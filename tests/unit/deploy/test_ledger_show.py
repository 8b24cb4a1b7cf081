"""The ledger as a person and as a program reads it: every term, and honest about what is not known."""

from __future__ import annotations

import json

from anabranch.consumers.drops import tally
from anabranch.deploy.ledger_look import Ledgers, RegionLedger
from anabranch.deploy.ledger_show import as_plain, drops_as_plain, render, render_drops
from anabranch.deploy.regions_asked import Asked
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.metrics import RegionCounts
from anabranch.transport.stream import GroupLag, LedgerCounts
from tests.fates import record

EAST = LedgerCounts(5, 2, {"trained": 2, "dropped:age": 1, "dropped:dead_letter": 1}, foreign=1)
AWAY = StreamUnavailableError("no answer at redis://:s3cret@h:1 \x1b[2J")


def ledgers(east: LedgerCounts = EAST, **last: RegionCounts) -> Ledgers:
    groups = (GroupLag("learner", 1, 1, 20), GroupLag("recorder", 0, 3, None))
    return Ledgers(Asked({"east": RegionLedger(east, groups)}, {"west": AWAY}), last)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_shows_every_term_and_where_readers_are() -> None:
    assert lines(render(ledgers())) == [
        "region groups", "east 5 produced", "1 + foreign: entries that no producer appended", "1 = dropped:age",
        "1 + dropped:dead_letter", "2 + trained", "2 + pending", "group learner: 1 not read, 1 read and not acknowledged",
        "group recorder: 0 not read, 3 read and not acknowledged",
        "west ? cannot be reached, and no learner says what it counted there",
    ]  # fmt: skip


def test_what_the_learner_counted_last_stands_for_a_region_that_is_away() -> None:
    text = render(ledgers(west=RegionCounts(produced=9, pending=2, fates={"trained": 7}, at_ms=1_000)), now_ms=41_000)
    assert lines(text)[-4:] == [
        "west ? cannot be reached; the learner counted 40 s ago:", "9 produced", "7 = trained", "2 + pending",
    ]  # fmt: skip


def test_a_ledger_that_does_not_balance_says_by_how_much() -> None:
    assert "DOES NOT BALANCE: 3 missing" in render(ledgers(LedgerCounts(7, 2, {"trained": 2})))
    assert "DOES NOT BALANCE: 1 too many" in render(ledgers(LedgerCounts(3, 2, {"trained": 2})))


def test_json_says_the_same_and_hides_what_is_to_be_hidden() -> None:
    shown = json.loads(json.dumps(as_plain(ledgers())))
    assert shown["east"]["balanced"] is True
    assert shown["east"]["produced"] + shown["east"]["foreign"] == sum(shown["east"]["fates"].values()) + 2
    assert shown["east"]["groups"][0] == {"name": "learner", "undelivered": 1, "pending": 1, "idle_ms": 20}
    assert shown["west"] == {"unreachable": "no answer at redis://:***@h:1 \\x1b[2J", "last": None}
    assert as_plain(ledgers(LedgerCounts(3, 2, {"trained": 2})))["east"]["too_many"] == 1


RECORDS = [record(seq=s, tokens=80 + s) for s in range(3)] + [
    record(seq=9, fate="dropped:age", tokens=800, region="west"),
    record(seq=3, fate="dropped:zero_variance", tokens=80),
]


def test_drops_by_region_and_over_all() -> None:
    text = render_drops(tally(RECORDS), [])
    assert lines(text) == [
        "region fate groups tokens a rollout cut age reward",
        "east trained 4 10.1 ± 0.1 12.5% 2.00 0.250 ± 0.000",
        "west dropped:age 1 100.0 12.5% 2.00 0.250",
        "all trained 4 10.1 ± 0.1 12.5% 2.00 0.250 ± 0.000",
        "dropped:age 1 100.0 12.5% 2.00 0.250",
        "",
        "Too few to compare: it takes 10 trained groups, and 10 that were dropped for one cause.",
    ]
    many = [record(seq=s, fate=fate) for s in range(10) for fate in ("trained", "dropped:age")]
    assert "do not differ from trained ones by more than 3 standard errors." in render_drops(tally(many), [])
    assert render_drops(tally(RECORDS), ["they differ"]).endswith("\n\nthey differ")
    assert render_drops({}, []) == "no group has ended yet"


def test_drops_for_a_program() -> None:
    shown = json.loads(json.dumps(drops_as_plain(tally(RECORDS), ["they differ"]), allow_nan=False))
    assert shown["verdicts"] == ["they differ"]
    assert shown["all"]["trained"]["groups"] == 4
    assert shown["regions"]["west"]["dropped:age"]["tokens_per_rollout"] == 100.0
    assert shown["regions"]["west"]["dropped:age"]["tokens_per_rollout_error"] is None
