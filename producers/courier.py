"""Carries one spool to its region's stream, and lets go of what the learner has settled.

Invariant: records are given in order, none before the stream has said where it stands, and again from there whenever it says
that it stands lower than before (a server that lost its last second). A record leaves the spool by the release rule alone.
An
entry that fails again and again though its region answers is named, with its size.
Held by tests/unit/producers/test_courier.py and tests/unit/producers/test_courier_stuck.py.

    ASKING    what the stream holds is not known: at the start and after every failure
    SENDING   it is, and there are records that it lacks
    SETTLING  it has all of them, and some are still kept
    EMPTY     nothing is kept
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import structlog

from anabranch.producers.release_rule import ReleaseRule
from anabranch.producers.spool import Spool
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import ConfigError, EnvelopeError, StreamUnavailableError
from anabranch.transport.stream import TrajectoryStream

ASK_EVERY_S = 1.0
BATCH_BYTES = 4 * 2**20
BATCH_RECORDS = 64


class CourierState(enum.Enum):
    ASKING = "asking"
    SENDING = "sending"
    SETTLING = "settling"
    EMPTY = "empty"


class Courier:
    """Used by one thread. `on_stored` is given the group indices that the stream holds from now on."""

    def __init__(
        self,
        stream: TrajectoryStream,
        spool: Spool,
        *,
        release_after_s: float,
        on_stored: Callable[[list[int]], None] = lambda indices: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self.spool, self._on_stored, self._clock = stream, spool, on_stored, clock
        self._rule = ReleaseRule(release_after_s)
        self._told = spool.floor  # `on_stored` was told of all below
        self._asked_s = float("-inf")
        self._batch = BATCH_RECORDS
        self._known = False  # whether the stream has ever said what it holds
        self._failing, self._tries = -1, 0  # the record that failed by itself while the region answered; how often
        self.next_seq = spool.floor  # the lowest number that the stream is not known to hold
        self.state = CourierState.ASKING
        self._log = structlog.get_logger()

    def interrupt(self, *, away: bool) -> None:
        """A call failed: ask before anything is given again, and begin with a single record. `away`: the server could not be
        reached, and may have forgotten something when it is back."""
        self.state = CourierState.ASKING
        self._batch = 1
        if away:
            self._rule.interrupt()

    def ask(self) -> None:
        """If it is time, ask what the stream holds and what of it is settled, and let go of that.

        Raises:
            StreamUnavailableError, BackpressureError: the stream's.
            OSError: the spool cannot be written.
        """
        if self.state is not CourierState.ASKING and self._clock() - self._asked_s < ASK_EVERY_S:
            return
        progress = self._stream.progress(self.spool.producer)
        if not self._known and (progress.next_seq or 0) > self.spool.opened_at:
            moved = self.spool.renumber(progress.next_seq or 0)
            self._log.error(
                "the stream holds more of this producer than its spool ever gave: the spool is an older state; going on there",
                producer=self.spool.producer, next_seq=progress.next_seq, spool_ended=self.spool.opened_at, groups_moved=moved,
            )  # fmt: skip
        self._known = True
        self._asked_s = self._clock()  # when it has answered: how long it took must not make the reading older
        self._stands_at(progress.next_seq or 0)
        self.spool.release(self._rule.read(self._asked_s, min(progress.settled_below, self.next_seq)))
        self._look()

    def send(self) -> bool:
        """Give the stream the next records that it lacks, in one round trip; returns whether there are more.

        Raises:
            StreamUnavailableError, BackpressureError: the stream's; `interrupt` then.
            ConfigError: a group is larger than an entry may be.
            OSError: the spool cannot be read for now.
        """
        if self.state is CourierState.ASKING:
            return False
        batch = self.spool.read(self.next_seq, max_bytes=BATCH_BYTES, max_records=self._batch)
        if not batch:
            self._look()
            return False
        try:
            expected = self._stream.append(batch, floor=self.spool.floor)
        except EnvelopeError as error:
            raise ConfigError(
                f"a group in the spool {self.spool.folder} does not fit an entry: {error}; raise stream.max_entry_bytes"
            ) from error
        except StreamUnavailableError as error:
            if len(batch) > 1:
                raise
            raise self._alone(batch[0], error) from error
        if expected == batch[0].seq:
            raise StreamUnavailableError(f"the stream answered, and took nothing of {batch[0].producer}/{expected}")
        self._stands_at(expected)
        self._batch = min(2 * self._batch, BATCH_RECORDS)
        self._look()
        return self.state is CourierState.SENDING

    def _alone(self, envelope: Envelope, error: StreamUnavailableError) -> StreamUnavailableError:
        """A record failed by itself, and the region had answered just before: from the second time on it is named."""
        self._tries = self._tries + 1 if envelope.seq == self._failing else 1
        self._failing = envelope.seq
        if self._tries < 2:
            return error
        size = len(envelope.payload)
        if self._tries & (self._tries - 1) == 0:  # 2, 4, 8, ...
            self._log.error(
                "an entry cannot be appended though its region answers: does it take longer to send than "
                "stream.socket_timeout_ms?",
                producer=envelope.producer, seq=envelope.seq, bytes=size, tries=self._tries, error=str(error),
            )  # fmt: skip
        return StreamUnavailableError(
            f"entry {envelope.producer}/{envelope.seq} of {size} bytes failed {self._tries} times though its region answers: {error}"
        )

    def _stands_at(self, expected: int) -> None:
        """The stream holds everything below `expected` and nothing else of what is kept."""
        now_next = min(max(expected, self.spool.floor), self.spool.next_seq)
        if now_next < self.next_seq:
            self._log.warning(
                "the stream has forgotten groups that it took; giving them again",
                producer=self.spool.producer, groups=self.next_seq - now_next,
            )  # fmt: skip
        self.next_seq = now_next
        if now_next > self._told:
            told, self._told = self._told, now_next
            self._on_stored(self.spool.groups(told, now_next))

    def _look(self) -> None:
        if self.next_seq < self.spool.next_seq:
            self.state = CourierState.SENDING
        else:
            self.state = CourierState.SETTLING if self.spool.floor < self.spool.next_seq else CourierState.EMPTY
