"""A region with dead letters of the usual kinds, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.memory_dead_letters import MemoryDeadLetters
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from tests.groups import entry

RUN = "run"
HOSTILE = b"\x1b[2J\x1b]0;owned\x07\r\n\xff"


def sealed(envelope: Envelope, **changes: bytes) -> dict[bytes, bytes]:
    """Its fields as stored, some of them changed."""
    fields = {name.encode(): value for name, value in envelope.seal().items()}
    return fields | {name.encode(): value for name, value in changes.items()}


@dataclass
class Box:
    store: MemoryStreamStore = field(default_factory=MemoryStreamStore)

    @property
    def stream(self) -> MemoryStream:
        return MemoryStream(self.store)

    @property
    def letters(self) -> MemoryDeadLetters:
        return MemoryDeadLetters(self.store)

    def put(self, cause: str, fields: dict[bytes, bytes] | None = None, index: int = 7) -> str:
        """Set an entry aside, a good one unless `fields` are given; the letter's id."""
        self.store.add(sealed(entry(index, producer="east-0-aa")) if fields is None else fields)
        return self.set_aside(cause)

    def set_aside(self, cause: str) -> str:
        (delivery,) = self.stream.read(LEARNER_GROUP, "c", max_entries=1, block_ms=0)
        self.stream.dead_letter(LEARNER_GROUP, delivery, cause)
        return self.letters.list(max_letters=1000)[-1].letter_id
