"""From the decision about a group to its acknowledgement: a line in the fate log first, then the stream.

Invariant: nothing is handed to a stream to be settled before its line is durable; a delivery that comes again after its
fate was decided is settled under the same fate and has no second line, across crashes too (`state` carries what is not yet
settled). A disk that is full delays both and loses neither. Held by tests/unit/learner/test_feed_crashes.py
and tests/unit/learner/test_feed_repeats.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from anabranch.consumers.arrivals import Arrival
from anabranch.consumers.batcher import group_age
from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.schemas.errors import CheckpointError, FateLogError
from anabranch.schemas.fates import DUPLICATE, FateRecord, Identity
from anabranch.schemas.versions import Forks, PolicyVersion

RETRY_S = 2.0


@dataclass(slots=True)
class Ending:
    """A decided fate. `entries`: the entry ids that carry the delivery, newest first. Where a copy of one was added by
    somebody else, there are several: the newest has the fate, the others are its duplicates."""

    record: FateRecord
    entries: list[str]
    logged: bool = False

    def fates(self) -> list[tuple[str, str]]:
        first, *others = self.entries
        return [(first, self.record.fate), *((entry, DUPLICATE) for entry in others)]

    def plain(self) -> dict[str, Any]:
        return {"entries": self.entries, "logged": self.logged, "record": self.record.model_dump()}


def read_ending(plain: Any) -> Ending:
    """Inverse of `Ending.plain`. Raises CheckpointError."""
    try:
        record = FateRecord.model_validate(plain["record"])
        return Ending(record, [str(entry) for entry in plain["entries"]], bool(plain["logged"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's list of groups to settle is not of this version of the program: {error}; "
            "resume with the program that wrote it"
        ) from error


def fate_record(arrival: Arrival, fate: str, now: PolicyVersion, forks: Forks) -> FateRecord:
    """What is kept of a group whose fate was decided at `now`."""
    rollouts = arrival.group.rollouts
    return FateRecord(
        region=arrival.region,
        producer=arrival.producer,
        seq=arrival.seq,
        group_index=arrival.group.group_index,
        attempt=arrival.group.attempt,
        fate=fate,
        epoch=now.epoch,
        version=now.version,
        age=group_age(arrival, now, forks),
        rollouts=len(rollouts),
        tokens=sum(len(r.token_ids) for r in rollouts),
        cut=sum(r.finish_reason == "length" for r in rollouts),
        reward=float(np.sum(arrival.group.rewards / len(rollouts))),  # cannot overflow
        time_ms=time.time_ns() // 1_000_000,
        delivered_ms=arrival.delivered_ms or None,
        admitted_ms=arrival.admitted_ms or None,
    )


class FateBook:
    """`resumed`: what a checkpoint's `state` held."""

    def __init__(
        self,
        log: FateLog,
        reader: Reader,
        *,
        resumed: Sequence[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fates, self._reader, self._clock = log, reader, clock
        self._log = structlog.get_logger()
        self._unlogged: dict[Identity, Ending] = {}
        self._logged: dict[Identity, Ending] = {}  # and not settled, as far as we know
        self._retry_at_s = 0.0
        self.error = ""  # why the log takes nothing now
        for ending in map(read_ending, resumed):
            # Logged by the learner that wrote the checkpoint, before it or after.
            if ending.logged or self._fates.fate(ending.record.identity) is not None:
                self._settle(ending)
            else:
                self._unlogged[ending.record.identity] = ending
        self.flush()

    def again(self, arrival: Arrival) -> bool:
        """Whether the delivery has its fate already; then its entry is settled under it."""
        identity = arrival.identity
        if (ending := self._unlogged.get(identity)) is not None:
            if arrival.entry_id not in ending.entries:
                ending.entries.insert(0, arrival.entry_id)
            return True
        fate = self._fates.fate(identity)
        if (ending := self._logged.get(identity)) is not None:
            fate = ending.record.fate
            if arrival.entry_id not in ending.entries:
                ending.entries.insert(0, arrival.entry_id)
        if fate is None:
            return False
        self._reader.settle(arrival.region, [(arrival.entry_id, fate)])
        return True

    def end(self, endings: Iterable[Ending]) -> None:
        """These are decided for good: log and settle them, now or as soon as the disk takes the lines."""
        for ending in endings:
            first = self._unlogged.setdefault(ending.record.identity, ending)
            if first is not ending:  # copies that came in one reply
                first.entries = list(dict.fromkeys([*ending.entries, *first.entries]))
        self.flush()

    def flush(self, *, at_once: bool = False) -> None:
        """Try again what the log did not take; `at_once`: without the pause after a failure."""
        if not self._unlogged or (self._clock() < self._retry_at_s and not at_once):
            return
        try:
            self._fates.append(ending.record for ending in self._unlogged.values())
        except FateLogError as error:
            if not self.error:
                self._log.error("fates of groups cannot be logged; their entries stay pending", error=str(error))
            self.error, self._retry_at_s = str(error), self._clock() + RETRY_S
            return
        self.error = ""
        endings, self._unlogged = list(self._unlogged.values()), {}
        for ending in endings:
            self._settle(ending)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint must hold of it; plain JSON."""
        self._forget_what_is_settled()
        return [ending.plain() for ending in (*self._unlogged.values(), *self._logged.values())]

    def __len__(self) -> int:
        """Groups whose fate is decided and has not reached log and stream."""
        self._forget_what_is_settled()
        return len(self._unlogged) + len(self._logged)

    def _settle(self, ending: Ending) -> None:
        ending.logged = True
        self._logged[ending.record.identity] = ending
        self._reader.settle(ending.record.region, ending.fates())

    def _forget_what_is_settled(self) -> None:
        open_ = self._reader.unsettled()
        self._logged = {
            identity: ending
            for identity, ending in self._logged.items()
            if any((ending.record.region, entry) in open_ for entry in ending.entries)
        }
