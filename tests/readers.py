"""Readers for tests: over regions in memory, and ways to wait for what their threads bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from anabranch.consumers.arrivals import Polled
from anabranch.consumers.reader import Reader
from anabranch.schemas.config import StreamSection
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.stream import TrajectoryStream

VOCABULARY = 100
DEADLINE_S = 20.0


class Regions:
    """Regions in memory, and readers over them. Use it as a context manager: readers have threads."""

    def __init__(self, *names: str) -> None:
        self.now_s = 1000.0
        self.stores = {name: MemoryStreamStore(clock=lambda: self.now_s) for name in names}
        self._readers: list[Reader] = []

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def stream(self, region: str) -> MemoryStream:
        return MemoryStream(self.stores[region])

    def reader(
        self, consumer: str = "learner-0", *, streams: Mapping[str, TrajectoryStream] | None = None, **config: Any
    ) -> Reader:
        """A process that starts; one at a time of a `consumer`: see `die`."""
        ledger_every_s = config.pop("ledger_every_s", None)
        made = Reader(
            streams or {name: self.stream(name) for name in self.stores},
            run="run",
            group=LEARNER_GROUP,
            consumer=consumer,
            config=StreamSection(block_ms=1, **config),
            vocabulary=VOCABULARY,
            ledger_every_s=ledger_every_s,
            clock=lambda: self.now_s,
        )
        self._readers.append(made)
        return made

    def die(self) -> None:
        """All readers end, with whatever they had read."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()


def drain(reader: Reader) -> Polled:
    """Everything that stands in the streams of the regions that can be reached."""
    total, mark = Polled(), reader.mark()
    wait(lambda: _poll(reader, total) or reader.caught_up(mark), "the reader to catch up")
    return total


def until(reader: Reader, done: Callable[[Polled], object]) -> Polled:
    """What arrives until it is enough."""
    total = Polled()
    wait(lambda: _poll(reader, total) or done(total), "what should arrive")
    return total


def wait(ready: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.001)


def indices(polled: Polled) -> list[int]:
    return sorted(a.group.group_index for a in polled.arrivals)


def _poll(reader: Reader, total: Polled) -> None:
    polled = reader.poll(block_ms=1)
    total.arrivals.extend(polled.arrivals)
    total.dead.extend(polled.dead)
