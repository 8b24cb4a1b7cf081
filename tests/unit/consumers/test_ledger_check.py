"""An alarm means that something is wrong; what is merely in motion raises none."""

from __future__ import annotations

from anabranch.consumers.ledger_check import PATIENCE, LedgerCheck, difference
from anabranch.consumers.region_reader import Counted
from anabranch.transport.stream import LedgerCounts

GOOD = LedgerCounts(10, 2, {"trained": 6, "dropped:age": 1, "dropped:dead_letter": 1})
LOGGED = {"east": {"trained": 6, "dropped:age": 1}}


class Looks:
    """One reading after the other."""

    def __init__(self) -> None:
        self.check, self.at_s = LedgerCheck(), 0.0

    def look(
        self, counts: LedgerCounts = GOOD, logged: dict[str, dict[str, int]] = LOGGED, *, unsettled: int = 0
    ) -> list[str]:
        """Kinds of the alarms that are new."""
        self.at_s += 1
        return [kind for _, kind in self.check.look({"east": Counted(counts, self.at_s, unsettled)}, logged)]


def test_a_ledger_that_holds_raises_nothing() -> None:
    looks = Looks()
    assert [looks.look() for _ in range(20)] == [[]] * 20


def test_one_that_does_not_balance_is_told_once_with_its_numbers_and_until_it_does() -> None:
    looks, bad = Looks(), LedgerCounts(10, 1, GOOD.fates)
    assert looks.look(bad) == ["balance"]
    assert looks.look(bad) == []
    (text,) = looks.check.alarms.values()
    assert (
        "1 groups are missing from the ledger of region east: produced 10 + foreign 0, but fates 8 + pending 1" in text
    )
    looks.look()
    assert looks.check.alarms == {}
    assert looks.look(LedgerCounts(10, 4, GOOD.fates)) == ["balance"]
    assert difference(LedgerCounts(10, 4, GOOD.fates)) == 2


def test_foreign_entries_are_part_of_the_equation() -> None:
    assert Looks().look(LedgerCounts(10, 3, GOOD.fates, foreign=1)) == []


def test_a_stream_that_settled_what_was_never_logged() -> None:
    looks = Looks()
    assert looks.look(logged={"east": {"trained": 6}}) == ["unlogged"]
    assert "settled 1 groups of which the fate log has no line" in next(iter(looks.check.alarms.values()))
    assert looks.look() == []
    copied = LedgerCounts(10, 2, GOOD.fates | {"dropped:duplicate": 1}, foreign=1)
    assert looks.look(copied) == [], "somebody's copy is settled without a line"


def test_a_server_that_forgot_fates_is_told_only_when_nobody_tells_it_again() -> None:
    looks, behind = Looks(), LedgerCounts(9, 2, {"trained": 5, "dropped:age": 1, "dropped:dead_letter": 1})
    looks.look()
    assert [looks.look(behind) for _ in range(PATIENCE - 1)] == [[]] * (PATIENCE - 1)
    assert looks.look() == [], "it came back: counting begins anew"
    assert [looks.look(behind, unsettled=1) for _ in range(2 * PATIENCE)] == [[]] * 2 * PATIENCE, "on its way"
    assert [looks.look(behind) for _ in range(PATIENCE)] == [[]] * (PATIENCE - 1) + [["forgotten"]]
    assert "lacks the fates of 1 groups" in next(iter(looks.check.alarms.values()))


def test_the_same_reading_is_judged_once() -> None:
    check, reading = LedgerCheck(), {"east": Counted(LedgerCounts(9, 0), 1.0, 0)}
    assert len(check.look(reading, {})) == 1
    check.alarms.clear()
    assert check.look(reading, {}) == {}
