"""The learner's eye on its regions: whether they can be read, and what their threads counted, judged and told to people.

Invariant: looking costs no call to anybody, so it never holds up a step; an alarm is told once when it begins and once when
it is over, and stands in the status in between; entries that are not ours are told whenever there are more of them, and stand
there for good. Held by tests/unit/learner/test_ledger_watch.py.
"""

from __future__ import annotations

import time

import structlog

from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.ledger_check import LedgerCheck
from anabranch.consumers.reader import Reader
from anabranch.schemas.metrics import RegionCounts

Note = tuple[str, dict[str, str | int | float]]  # what, detail: of a NoteRecord


class LedgerWatch:
    """`reader` must read the ledgers (its `ledger_every_s`)."""

    def __init__(self, reader: Reader, fates: FateLog) -> None:
        self._reader, self._fates, self._check = reader, fates, LedgerCheck()
        self._refusing: dict[str, str] = {}  # region -> alarm
        self._foreign: dict[str, int] = {}  # region -> entries that are not ours, as told
        self._log = structlog.get_logger()

    def look(self) -> list[Note]:
        """What is to be noted: alarms that begin or end, and more entries that are not ours."""
        return [*self._ledgers(), *self._refusals(), *self._strangers()]

    def alarms(self) -> tuple[str, ...]:
        return (*self._refusing.values(), *self._check.alarms.values())

    def notes(self) -> tuple[str, ...]:
        """What a person may want to know, though the ledger holds."""
        return tuple(f"region {name}: {n} entries that no producer appended" for name, n in self._foreign.items() if n)

    def _ledgers(self) -> list[Note]:
        before = dict(self._check.alarms)
        new = self._check.look(self._reader.counted(), self._fates.counts)
        notes: list[Note] = []
        for (region, kind), text in new.items():
            self._log.error("the ledger does not hold", region=region, alarm=text)
            notes.append(("ledger_alarm", {"region": region, "kind": kind, "alarm": text}))
        for region, kind in before.keys() - self._check.alarms.keys():
            self._log.info("the ledger holds again", region=region, kind=kind)
            notes.append(("ledger_holds", {"region": region, "kind": kind}))
        return notes

    def _refusals(self) -> list[Note]:
        """The regions' threads have logged them."""
        before, refusing = self._refusing, self._reader.refusing()
        self._refusing = {name: f"region {name} refuses the learner: {why}" for name, why in refusing.items()}
        notes: list[Note] = [
            ("region_alarm", {"region": name, "alarm": text})
            for name, text in self._refusing.items()
            if name not in before
        ]
        return notes + [("region_answers", {"region": name}) for name in before if name not in refusing]

    def _strangers(self) -> list[Note]:
        notes: list[Note] = []
        for name, reading in self._reader.counted().items():
            before, now = self._foreign.get(name, 0), reading.counts.foreign
            self._foreign[name] = now  # fewer: the server has forgotten some
            if now > before:
                told: dict[str, str | int | float] = {"region": name, "foreign": now, "new": now - before}
                self._log.warning("entries in a stream that no producer appended: who writes there?", **told)
                notes.append(("foreign_entries", told))
        return notes

    def regions(self) -> dict[str, str]:
        """Region -> how reading it goes, and since when."""
        return {name: str(health) for name, health in self._reader.health().items()}

    def pending(self) -> dict[str, int]:
        """Region -> groups in its stream without a fate."""
        return {name: reading.counts.pending for name, reading in self._reader.counted().items()}

    def ledger(self) -> dict[str, RegionCounts]:
        now_ms, now_s = time.time_ns() // 1_000_000, self._reader.now_s
        return {
            name: RegionCounts(
                produced=reading.counts.produced,
                foreign=reading.counts.foreign,
                pending=reading.counts.pending,
                fates=reading.counts.fates,
                at_ms=now_ms - int(1000 * (now_s - reading.at_s)),
            )
            for name, reading in self._reader.counted().items()
        }
