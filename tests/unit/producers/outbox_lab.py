"""An outbox for tests: on files of its own and a stream that fails as told, without threads or with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from anabranch.producers.outbox import Outbox
from anabranch.producers.spool_load import read_spool
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.trajectory import Group, decode_group
from anabranch.transport.stream import TrajectoryStream
from tests.groups import group
from tests.spools import Rough, fresh, section


def outbox(stream: TrajectoryStream, folder: Path, spool: SpoolSection | None = None, **options: object) -> Outbox:
    made = spool or section()
    options = {"max_entry_bytes": 1 << 24, "groups_in_flight": 2, **options}
    return Outbox(stream, SpoolSlots(folder, "east", made), made, region="east", **options)


def big(index: int, size: int) -> Group:
    return replace(group(index), prompt_text="x" * size)


class Lab:
    """An outbox without threads, and a clock."""

    def __init__(self, folder: Path, **spool: object) -> None:
        self.now = 50.0
        self.stream = Rough()
        self.folder = folder
        self.outbox = outbox(
            self.stream, folder, section(**spool), clock=lambda: self.now, clock_ms=lambda: round(self.now * 1000)
        )

    def run(self, seconds: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.outbox.sender.turn()
            self.outbox.keep()
            self.now += 0.1

    def watch(self, seconds: float) -> None:
        """As `run`, with the producer's loop beside it. Raises what `Outbox.check` does."""
        end = self.now + seconds
        while self.now < end:
            self.run(0.1)
            self.outbox.check()

    def spooled(self) -> list[int]:
        return [index for _, _, index, _ in read_spool(self.folder / "east" / "00")]

    def spooled_ms(self) -> list[int]:
        """As the groups in the spool say it."""
        return [decode_group(payload).spooled_ms for _, _, _, payload in read_spool(self.folder / "east" / "00")]


def stored(stream: TrajectoryStream) -> list[int]:
    envelopes = fresh(stream)
    assert all(decode_group(e.payload).group_index == e.group_index for e in envelopes)
    return [e.group_index for e in envelopes]


def until(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.005)
