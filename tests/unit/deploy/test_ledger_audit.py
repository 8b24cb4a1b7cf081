"""Every delivery in one place, and what is nowhere, or twice, is found."""

from __future__ import annotations

from pathlib import Path

from anabranch.deploy.ledger_audit import RegionPlaces, audit, left_behind, read_spools, render_audit
from anabranch.producers.spool import Spool
from anabranch.schemas.config import SpoolSection
from anabranch.transport.stream import LedgerCounts
from tests.fates import record

P = "east-0-ab"


def places(*, fates: dict[str, int], open_: set[int] = frozenset(), last: int, **more) -> dict[str, RegionPlaces]:
    counts = LedgerCounts(last, len(open_), fates, more.pop("foreign", 0))
    dead = {(P, seq) for seq in more.pop("dead", ())}
    return {"east": RegionPlaces(counts, {(P, seq) for seq in open_}, {P: last}, dead, **more)}


def logged(*seqs: int, **changes) -> list:
    return [record(seq=seq, group_index=seq, **changes) for seq in seqs]


def wrong(*args) -> list[str]:
    return audit(*args)["east"].wrong


def test_everything_in_its_place() -> None:
    where = places(fates={"trained": 2, "dropped:dead_letter": 1}, open_={3, 4}, last=5, dead={5})
    found = audit(where, {"east": {(P, 4), (P, 6)}}, logged(1, 2, 3))["east"]
    assert (found.logged, found.settling, found.open, found.dead, found.spooled, found.wrong) == (3, 1, 1, 1, 1, [])
    text = render_audit({"east": found}, spools_here=True)
    assert "Every delivery has one place" in text
    assert "No spool" in render_audit({"east": found}, spools_here=False)


def test_a_delivery_that_is_nowhere() -> None:
    (said,) = wrong(places(fates={"trained": 3}, last=5), {}, logged(1, 3, 5))
    assert said == f"2 deliveries are nowhere, of which 0 may be discarded dead letters: {P}/2, {P}/4"
    assert wrong(places(fates={"trained": 3}, last=5), {"east": {(P, 2), (P, 4)}}, logged(1, 3, 5)) == []


def test_a_gap_in_what_the_spool_holds_is_a_loss() -> None:
    (said,) = wrong(places(fates={}, last=0), {"east": {(P, 1), (P, 3)}}, [])
    assert f"{P}/2" in said


def test_discarded_dead_letters_may_be_what_is_nowhere() -> None:
    counts = {"trained": 1, "dropped:dead_letter": 2, "dropped:lost": 1}
    assert wrong(places(fates=counts, last=4), {}, logged(1)) == []
    (said,) = wrong(places(fates=counts | {"dropped:lost": 0}, last=4), {}, logged(1))
    assert "3 deliveries are nowhere, of which 2 may" in said


def test_a_number_that_only_a_dead_letter_claims_makes_nothing_expected() -> None:
    """It is what nobody could read; and one beyond all reason is not counted up to."""
    assert wrong(places(fates={"trained": 1, "dropped:dead_letter": 1}, last=1, dead={10**15}), {}, logged(1)) == []
    (said,) = wrong(places(fates={"trained": 1}, last=1, foreign=1), {}, logged(1, 10**15))
    assert said.startswith(
        f"{10**15 - 2} deliveries are nowhere, of which 0 may be discarded dead letters: {P}/2, {P}/3,"
    )


def test_a_delivery_with_two_lines() -> None:
    said = wrong(places(fates={"trained": 2}, last=1), {}, logged(1) + logged(1, fate="dropped:age"))
    assert said == [f"1 deliveries have more than one fate: {P}/1"]


def test_counts_that_differ_from_the_log() -> None:
    (said,) = wrong(places(fates={"trained": 1}, last=2), {}, logged(1, 2))
    assert said == "the stream has counted 1 fewer fates than the log has: trained 1 and 2"
    (said,) = wrong(places(fates={"trained": 3}, last=2), {}, logged(1, 2))
    assert "1 more fates" in said
    assert wrong(places(fates={"trained": 3}, last=2, foreign=1), {}, logged(1, 2)) == [], "somebody's copy"
    assert wrong(places(fates={"trained": 1}, last=2, in_motion=1), {}, logged(1, 2)) == [], "counted while we looked"
    assert wrong(places(fates={"trained": 1}, last=1), {}, logged(1, 2)) == [], "appended after we looked"


def test_an_index_that_was_trained_twice_in_one_epoch() -> None:
    (said,) = wrong(places(fates={"trained": 2}, last=2), {}, [record(seq=1), record(seq=2)])
    assert said == "1 groups were trained twice in one epoch: group 9 in epoch 1"
    twice = [record(seq=1), record(seq=2, epoch=2), record(seq=3, fate="dropped:duplicate")]
    assert wrong(places(fates={"trained": 2, "dropped:duplicate": 1}, last=3), {}, twice) == []


def test_spools_are_read_as_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "east" / "0"
    folder.mkdir(parents=True)
    spool = Spool(folder, SpoolSection(), producer=P)
    for index in (7, 8, 9):
        spool.append(index, b"payload")
    assert read_spools(tmp_path) == {"east": {(P, 1), (P, 2), (P, 3)}}
    spool.close()
    assert read_spools(tmp_path / "none") == {}


def test_spools_of_a_region_that_is_not_in_the_configuration_are_told() -> None:
    spools = {"east": {(P, 1)}, "old": {(P, 1), (P, 2), (P, 3)}}
    records = [*logged(1, region="old"), *logged(2)]
    left = left_behind(spools, ["east"], records)
    assert left == {"old": 2}
    assert left_behind(spools, ["east", "old"], records) == {}
    assert left_behind(spools, ["east"], logged(1, 2, 3, region="old")) == {}, "all of them have ended"
    text = render_audit({}, spools_here=True, left=left)
    assert "old          WRONG: spools of this region hold 2 groups" in text
    assert "Every delivery has one place" not in text
