"""Finished groups on their way to the region's stream, through a spool on disk.

Invariant: after `put` returned, the group is in the spool, or, while the disk is full, kept in memory and tried again once a
second with an alarm in the log; it leaves the spool only when the learner has settled it for good. `put` waits for no
network, and nothing waits without end: neither for room, nor for the region (`check`). What a process leaves in its
spool is sent by the next one, or by a neighbour. A group that no entry can hold ends
the process with ConfigError (exit 78): whoever samples it next would fail likewise.
Held by tests/unit/producers/test_outbox.py, test_outbox_room.py, test_outbox_region.py, test_outbox_threads.py beside it and
tests/process/test_spool_kills.py.
"""

from __future__ import annotations

import enum
import errno
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from anabranch.producers.append_wait import AppendWait
from anabranch.producers.sender import Sender
from anabranch.producers.spool import OVERHEAD
from anabranch.producers.spool_room import Room, RoomAlarm
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.producers.turns import Turns, wait_while
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.errors import BackpressureError, ConfigError
from anabranch.schemas.trajectory import Group, encode_group, stamp_spooled
from anabranch.transport.stream import TrajectoryStream

DISK_RETRY_S = 1.0
FIRST_GUESS_BYTES = 64 * 2**10  # size of a group before one was seen
_GONE = "the spool's folder was removed under this producer, which must be stopped and started again"
CLOSE_S = 2.0  # how long a stop waits for a stream that answers to take what is left


class OutboxState(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Outbox:
    """Takes the first free spool of the region when it is made, and has threads of its own from `start` to `close`.

    Args:
        stream: used by the sender's thread alone.
        groups_in_flight: how many groups may still come after `accepts` has turned False.

    Raises what `SpoolSlots.claim` does.
    """

    def __init__(
        self,
        stream: TrajectoryStream,
        slots: SpoolSlots,
        section: SpoolSection,
        *,
        region: str,
        max_entry_bytes: int,
        groups_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._section, self._region, self._clock, self._clock_ms = section, region, clock, clock_ms
        self._max_entry_bytes = max_entry_bytes
        self._in_flight = groups_in_flight
        self._slot = slots.claim()
        self._spool = self._slot.spool
        self._alarm = RoomAlarm(self._slot.folder, deadline_s=section.full_deadline_s, clock=clock)
        self._append_wait = AppendWait(region, self._slot.folder, deadline_s=section.full_deadline_s, clock=clock)
        self._lock = threading.RLock()  # over the four below and the order of writes
        self._unwritten: deque[tuple[int, bytes]] = deque()
        self._stored: list[int] = []
        self._largest = FIRST_GUESS_BYTES
        self._disk_error, self._retry_at, self._sync_error = "", float("-inf"), ""
        self._sync_at = clock()
        self.sender = Sender(
            stream, slots, self._slot,
            region=region, release_after_s=section.release_after_ms / 1000, on_stored=self._note_stored, clock=clock,
        )  # fmt: skip
        self._threads = [Turns("spool-sender", self.sender.turn), Turns("spool-keeper", self.keep)]
        self.state = OutboxState.NEW
        self._log = structlog.get_logger()
        if self._spool.floor < self._spool.next_seq:
            self._log.info(
                "going on with the spool of an earlier process",
                producer=self.producer, folder=str(self._slot.folder), groups=self._spool.next_seq - self._spool.floor,
            )  # fmt: skip

    @property
    def producer(self) -> str:
        """The identity of the spool, and so of this producer."""
        return self._spool.producer

    def start(self) -> None:
        assert self.state is OutboxState.NEW
        self.state = OutboxState.RUNNING
        for thread in self._threads:
            thread.start()

    def put(self, group: Group) -> None:
        """Spool `group`. While the disk is full or the spool at its bound it is kept in memory and tried again.

        Raises:
            TrajectoryError: it is not well formed (a non-finite reward or log-prob).
            ConfigError: it is larger than an entry of the stream, or the whole spool, may be.
        """
        payload = encode_group(group)
        where = f"group {group.group_index} of {len(payload)} bytes does not fit"
        advice = "lower sampling.group_size or sampling.max_tokens, or raise"
        if len(payload) > self._max_entry_bytes:
            raise ConfigError(f"{where} an entry; {advice} stream.max_entry_bytes ({self._max_entry_bytes})")
        if len(payload) + OVERHEAD > self._section.max_bytes:
            raise ConfigError(f"{where} the spool; {advice} spool.max_bytes ({self._section.max_bytes})")
        with self._lock:
            self._largest = max(self._largest, len(payload))
            self._unwritten.append((group.group_index, payload))
            self._write()
            self._look()
        self._threads[0].wake()

    @property
    def accepts(self) -> bool:
        """Whether another group may be started."""
        return self._alarm.room is Room.OPEN

    @property
    def held_up(self) -> bool:
        """The stream takes nothing at present, and a whole round of groups waits for it."""
        return bool(self.sender.error) and len(self) >= self._in_flight

    def appended(self) -> list[int]:
        """Group indices that the stream has taken since the last call. One may come twice: a server forgot it."""
        with self._lock:
            stored, self._stored = self._stored, []
            return stored

    def adopted(self) -> list[tuple[str, list[int]]]:
        """Producers that have gone, whose spools were taken over since the last call, with the groups in them."""
        return self.sender.adoptions()

    def waiting(self) -> set[int]:
        """Group indices put, by this process or an earlier one, and not known to be in the stream."""
        with self._lock:
            unwritten = [index for index, _ in self._unwritten]
            return {*self._spool.groups(self.sender.courier.next_seq), *unwritten}

    def spooled(self) -> set[int]:
        """Group indices in the spool at all: those in the stream that it has not let go of among them."""
        return {*self._spool.groups(0), *self.waiting()}

    def __len__(self) -> int:
        return self.sender.waiting + len(self._unwritten)

    @property
    def error(self) -> str:
        """Why something waits; "" if nothing is wrong."""
        return self._alarm.error or self._sync_error or self.sender.error

    @property
    def waiting_for(self) -> str:
        """What somebody who looks at an idle producer should know; "" if nothing is wrong."""
        if self._alarm.waiting_for:
            return self._alarm.waiting_for
        count = len(self)
        return f"region {self._region}: {count} groups to append" if self.sender.error and count else ""

    def check(self) -> None:
        """Raises:
        DeadlineError: no room in the spool, or on its disk, for spool.full_deadline_s; or groups that wait for the region
            so long, while it takes none and none is finished.
        AnabranchError: what a thread of the outbox died of, such as refused credentials.
        """
        for thread in self._threads:
            if thread.failure is not None:
                raise thread.failure
        self._alarm.check()
        spooled, taken, unwritten = self._spool.next_seq, self.sender.courier.next_seq, len(self._unwritten)
        self._append_wait.check(
            self.sender.error, finished=spooled + unwritten, taken=taken, waiting=spooled - taken + unwritten
        )

    def keep(self) -> float:
        """What is to be done on the disk now and then; returns after how many seconds again."""
        with self._lock:
            self._write()
            self._look()
        interval_s = self._section.fsync_interval_ms / 1000
        if self._section.fsync == "interval" and self._clock() >= self._sync_at:
            self._sync()
            self._sync_at = self._clock() + interval_s
        return min(interval_s, DISK_RETRY_S / 4)

    def close(self) -> None:
        """Stop. What the stream has not taken stays in the spool, which is left to the next process."""
        if self.state is not OutboxState.RUNNING:
            if self.state is OutboxState.NEW:
                self._slot.close()
            self.state = OutboxState.CLOSED
            return
        self.state = OutboxState.CLOSED
        wait_while(self._drains, deadline_s=CLOSE_S)
        ended = [thread.stop(wait_s=CLOSE_S) for thread in self._threads]
        with self._lock:
            self._retry_at = float("-inf")
            self._write()
        if self._section.fsync != "never":
            self._sync()
        if self._unwritten:
            self._log.error(
                "the disk did not take the last groups; they are lost, and sampled again when their leases run out",
                groups=[index for index, _ in self._unwritten], spool=str(self._slot.folder), error=self._alarm.error,
            )  # fmt: skip
        if self.sender.waiting:
            self._log.warning(
                "groups wait in the spool for the region's stream; the next producer here sends them",
                groups=self.sender.waiting, spool=str(self._slot.folder), region=self._region, error=self.sender.error,
            )  # fmt: skip
        if all(ended):  # else the spool stays ours until the process ends
            self.sender.close()
            self._slot.close()

    def _drains(self) -> bool:
        return bool(len(self)) and not self.error and all(thread.failure is None for thread in self._threads)

    def _write(self) -> None:
        """Write what waits in memory, in order, as far as the spool takes it; each with the time of the write that succeeds."""
        while self._unwritten and self._clock() >= self._retry_at:
            index, payload = self._unwritten[0]
            try:
                self._spool.append(index, stamp_spooled(payload, self._clock_ms()))
            except BackpressureError:
                return  # `_look` sees it
            except OSError as error:
                advice = _GONE if error.errno == errno.ENOENT else "free some space"
                self._disk_error, self._retry_at = f"{error}; {advice}", self._clock() + DISK_RETRY_S
                return
            self._unwritten.popleft()
        if not self._unwritten:
            self._disk_error = ""

    def _look(self) -> None:
        """Say what room there is. A full spool opens again when a quarter of it is free beyond what is in flight."""
        held, most = self._spool.bytes_held, self._section.max_bytes
        reserve = min(self._in_flight * (self._largest + OVERHEAD), most // 2)
        about = {"bytes_held": held, "max_bytes": most, "in_memory": len(self._unwritten), "to_append": len(self)}
        if self._disk_error:
            self._alarm.is_now(Room.DISK, f"the disk takes no writes: {self._disk_error}", about=about)
            return
        margin = most // 4 if self._alarm.room is Room.FULL else 0
        if self._unwritten or held + reserve + margin > most:
            behind = self.sender.error or "the learner has not settled the groups in it"
            self._alarm.is_now(Room.FULL, f"the spool is full ({held} of {most} bytes): {behind}", about=about)
        else:
            self._alarm.is_now(Room.OPEN, about=about)

    def _sync(self) -> None:
        try:
            self._spool.sync()
            self._sync_error = ""
        except OSError as error:
            if not self._sync_error:
                self._log.error("fsync of the spool failed", spool=str(self._slot.folder), error=str(error))
            self._sync_error = f"fsync of the spool failed: {error}"

    def _note_stored(self, indices: list[int]) -> None:
        with self._lock:
            self._stored += indices
