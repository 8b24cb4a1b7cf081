"""What rank 0 tells the others of publishing, and what is told of it afterwards. Plain data, as JSON where it travels."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass

from anabranch.schemas.manifest import Manifest


@dataclass(frozen=True, slots=True)
class EpochOpening:
    """An epoch begins: the present weights become its version `fork_version`."""

    run: str
    epoch: int
    fork_version: int
    step: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> EpochOpening:
        return cls(**json.loads(data))


class AnchorOrder(enum.Enum):
    """How the next version's anchor is to be made."""

    BESIDE = "beside the steps"
    WAIT = "before the next step"  # none could be made beside them: the states they overwrite do not fit into memory


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """The present weights become `version`; with `anchor` it gets a full snapshot too, in the background, or, with
    `wait`, before any version after it is begun."""

    version: int
    step: int
    anchor: bool = False
    wait: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PublishOrder:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is on the channel. `seconds` from its snapshot to its commit."""

    manifest: Manifest
    seconds: float

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def payload_bytes(self) -> int:
        return self.manifest.payload_bytes

    @property
    def changed_fraction(self) -> float:
        return self.manifest.changed_elements / max(1, self.manifest.total_elements)
