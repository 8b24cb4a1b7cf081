"""Brings a region's spooled groups to its stream: those of this producer, and those of producers that have gone.

Invariant: a stream that is away or full is tried again with growing pauses, the longest `LONGEST_PAUSE_S`, and nothing of a
spool is given up meanwhile. A spool left behind is adopted, sent like our own, and removed with the stream's memory of its
producer once nothing of it is kept. What goes wrong with an adopted spool is told and stops no other.
Held by tests/unit/producers/test_sender.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import structlog

from anabranch.producers.courier import ASK_EVERY_S, Courier, CourierState
from anabranch.producers.spool_slots import Slot, SpoolSlots
from anabranch.schemas.errors import AnabranchError, BackpressureError, StreamUnavailableError
from anabranch.transport.stream import TrajectoryStream

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LOOK_EVERY_S = 2.0  # for spools left behind
MOST_ADOPTED = 4


class Sender:
    """`turn` is called by one thread, again after the seconds that it returns, or earlier when there is something new."""

    def __init__(
        self,
        stream: TrajectoryStream,
        slots: SpoolSlots,
        own: Slot,
        *,
        region: str,
        release_after_s: float,
        on_stored: Callable[[list[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._slots, self._own, self._region = stream, slots, own, region
        self._release_after_s, self._clock = release_after_s, clock
        self.courier = Courier(stream, own.spool, release_after_s=release_after_s, on_stored=on_stored, clock=clock)
        self._adopted: dict[Slot, Courier] = {}
        self._told: deque[tuple[str, list[int]]] = deque()  # adopted since `adoptions` was called last
        self._refused: list[Slot] = []  # adopted, and not to be sent by us; locked, so that we do not adopt them again
        self._look_at = clock() + LOOK_EVERY_S
        self._retry_at = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self.error = ""  # why nothing is taken at present

    @property
    def waiting(self) -> int:
        """Groups of ours in the spool that the stream is not known to hold."""
        return self._own.spool.next_seq - self.courier.next_seq

    @property
    def adopted(self) -> int:
        return len(self._adopted)

    def adoptions(self) -> list[tuple[str, list[int]]]:
        """Producers whose spools were adopted since the last call, with the groups in them. Any thread."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def turn(self) -> float:
        """One round trip for every spool that has something to send or is due to be asked about.

        Raises:
            AnabranchError: what no later try would mend, such as refused credentials.
        """
        now = self._clock()
        if now < self._retry_at:
            return self._retry_at - now
        self._adopt(now)
        try:
            more = self._carry(self.courier)
            for slot, courier in list(self._adopted.items()):
                more |= self._carry_adopted(slot, courier)
        except (StreamUnavailableError, BackpressureError, OSError) as error:
            return self._failed(error)
        if self.error:
            structlog.get_logger().info("region stream is back", region=self._region, groups_waiting=self.waiting)
        self.error, self._pause_s = "", FIRST_PAUSE_S
        return 0.0 if more else ASK_EVERY_S / 2

    def close(self) -> None:
        """Leave adopted spools to others."""
        for slot in [*self._adopted, *self._refused]:
            slot.close()
        self._adopted, self._refused = {}, []

    def _carry(self, courier: Courier) -> bool:
        courier.ask()
        return courier.send()

    def _carry_adopted(self, slot: Slot, courier: Courier) -> bool:
        try:
            more = self._carry(courier)
            if courier.state is CourierState.EMPTY:
                self._retire(slot)
            return more
        except (StreamUnavailableError, BackpressureError):
            raise
        except (AnabranchError, OSError) as error:
            structlog.get_logger().error("an adopted spool is left alone", folder=str(slot.folder), error=str(error))
            del self._adopted[slot]
            self._refused.append(slot)
            return False

    def _retire(self, slot: Slot) -> None:
        """Nothing of an adopted spool is kept. First its files say so: else whoever finds them after the stream has forgotten
        their producer would give everything in them again."""
        try:
            slot.spool.compact()
            if self._stream.forget_producer(slot.spool.producer):
                self._slots.remove(slot)
                del self._adopted[slot]
                structlog.get_logger().info("adopted spool is empty and removed", folder=str(slot.folder))
        except StreamUnavailableError:
            raise
        except (
            OSError
        ) as error:  # the disk, or another process that looks for a slot at this moment: the next turn tries again
            structlog.get_logger().debug("adopted spool not removed yet", folder=str(slot.folder), error=str(error))

    def _adopt(self, now: float) -> None:
        if now < self._look_at or len(self._adopted) >= MOST_ADOPTED:
            return
        self._look_at = now + LOOK_EVERY_S
        ours = {slot.folder for slot in (self._own, *self._adopted, *self._refused)}
        try:
            slot = self._slots.adopt(ours=ours)
        except OSError as error:
            structlog.get_logger().debug("no look at spools left behind", error=str(error))
            return
        if slot is not None:
            self._adopted[slot] = Courier(
                self._stream, slot.spool, release_after_s=self._release_after_s, clock=self._clock
            )
            self._told.append((slot.spool.producer, slot.spool.groups(0)))
            structlog.get_logger().info(
                "adopted the spool of a producer that has gone",
                folder=str(slot.folder), producer=slot.spool.producer, groups=slot.spool.next_seq - slot.spool.floor,
            )  # fmt: skip

    def _failed(self, error: Exception) -> float:
        if not self.error:
            structlog.get_logger().warning(
                "cannot append; groups wait in the spool",
                region=self._region, groups_waiting=self.waiting, folder=str(self._own.folder), error=str(error),
            )  # fmt: skip
        self.error = str(error)
        for courier in (self.courier, *self._adopted.values()):
            courier.interrupt(away=isinstance(error, StreamUnavailableError))
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._retry_at = self._clock() + pause
        return pause
