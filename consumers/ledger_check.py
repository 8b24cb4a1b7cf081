"""Whether the ledger of a run holds, region by region, and against the fate log.

Invariant: what is alarmed is wrong, not merely in motion: `produced + foreign = fates + pending` is read in one act of the
region's server; a fate is in the log before it is in a stream, never the other way round; and a server that has fewer fates
than the log is alarmed only when nothing is on its way and it stays so. Pure. Held by tests/unit/consumers/test_ledger_check.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.consumers.region_reader import Counted
from anabranch.schemas.fates import LOGGED
from anabranch.transport.stream import LedgerCounts

PATIENCE = 6  # looks in a row at which a server lacks fates that the log has

Alarm = tuple[str, str]  # region, kind


def difference(counts: LedgerCounts) -> int:
    """How many groups too many are accounted for (negative: are missing)."""
    return counts.pending + sum(counts.fates.values()) - counts.produced - counts.foreign


def settled(counts: LedgerCounts) -> int:
    """Fates in a stream's ledger that have a line in the fate log."""
    return sum(n for fate, n in counts.fates.items() if fate in LOGGED)


class LedgerCheck:
    """Call `look` with every new reading; `alarms` is what holds now."""

    def __init__(self) -> None:
        self.alarms: dict[Alarm, str] = {}
        self._seen_s: dict[str, float] = {}
        self._logged_before: dict[str, int] = {}
        self._behind: dict[str, int] = {}

    def look(self, counted: Mapping[str, Counted], logged: Mapping[str, Mapping[str, int]]) -> dict[Alarm, str]:
        """`logged`: region -> fate -> lines of the fate log, now. Returns the alarms that are new."""
        before = dict(self.alarms)
        for region, reading in counted.items():
            if self._seen_s.get(region) != reading.at_s:
                self._seen_s[region] = reading.at_s
                self._judge(region, reading, sum(logged.get(region, {}).values()))
        return {alarm: text for alarm, text in self.alarms.items() if alarm not in before}

    def _judge(self, region: str, reading: Counted, logged: int) -> None:
        counts, off = reading.counts, difference(reading.counts)
        many, word = (-off, "missing from") if off < 0 else (off, "too many in")
        self._set(
            (region, "balance"),
            f"{many} groups are {word} the ledger of region {region}: produced {counts.produced} + foreign {counts.foreign}, "
            f"but fates {sum(counts.fates.values())} + pending {counts.pending}"
            if off
            else "",
        )
        surplus = settled(counts) - logged - counts.foreign
        self._set(
            (region, "unlogged"),
            f"region {region} has settled {surplus} groups of which the fate log has no line: is another learner at work, "
            "or was the log lost?"
            if surplus > 0
            else "",
        )
        lacking = self._logged_before.get(region, 0) - settled(counts)
        self._behind[region] = self._behind.get(region, 0) + 1 if lacking > 0 and not reading.unsettled else 0
        self._set(
            (region, "forgotten"),
            f"the Redis of region {region} lacks the fates of {lacking} groups that the fate log has: it has lost data that "
            "nobody gives it again"
            if self._behind[region] >= PATIENCE
            else "",
        )
        self._logged_before[region] = logged

    def _set(self, alarm: Alarm, text: str) -> None:
        if text:
            self.alarms[alarm] = text
        else:
            self.alarms.pop(alarm, None)
