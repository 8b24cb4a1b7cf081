"""One spool, one stream that fails as told, and the courier between them."""

from __future__ import annotations

from pathlib import Path

from anabranch.producers.courier import Courier
from anabranch.producers.spool import Spool
from tests.spools import Rough, fresh, section

PRODUCER = "east-00-abc123"


class Lab:
    def __init__(self, folder: Path, *, release_after_s: float = 0.0, **options: int) -> None:
        self.now = 100.0
        self.stream = Rough(**options)
        self.spool = Spool(folder, section(max_bytes=2**20, segment_bytes=65536), producer=PRODUCER)
        self.stored: list[int] = []
        self.release_after_s = release_after_s
        self.courier = self.meet(self.spool)

    def meet(self, spool: Spool) -> Courier:
        return Courier(
            self.stream,
            spool,
            release_after_s=self.release_after_s,
            on_stored=lambda groups: self.stored.extend(groups),
            clock=lambda: self.now,
        )

    def turn(self, after_s: float = 0.0) -> bool:
        self.now += after_s
        self.courier.ask()
        return self.courier.send()

    def drain(self) -> None:
        while self.turn():
            pass

    def numbers(self) -> list[int]:
        return [e.seq for e in fresh(self.stream)]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.stream.calls]
