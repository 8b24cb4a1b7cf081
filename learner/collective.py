"""The training engine of all ranks behind the interface of one.

Invariant: rank 0 decides, the others follow. Every collective method first broadcasts what is about to happen (one
opcode and its bytes), so all ranks enter it together and a loop that knows nothing of ranks can drive any number of
them. `follow` returns only when rank 0 says stop; a rank 0 that dies ends the others through the process group's
time-out and the parent-death signal. Held by tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import contextlib
import enum
import json
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from anabranch.learner.batch import TrainBatch
from anabranch.learner.distribute import broadcast_bytes
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.step import StepOutput
from anabranch.schemas.layout import Layout


class Op(enum.IntEnum):
    STEP = 1
    STATE = 2
    SAVE = 3
    LOAD = 4
    STOP = 5


class CollectiveEngine:
    """Rank 0's view."""

    def __init__(self, engine: LearnerEngine, *, world_size: int) -> None:
        self._engine, self._world_size = engine, world_size

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def vocabulary(self) -> int:
        return self._engine.vocabulary

    @property
    def model_dir(self) -> Path:
        return self._engine.model_dir

    def learning_rate(self, step: int) -> float:
        return self._engine.learning_rate(step)

    def train_step(self, batch: TrainBatch) -> StepOutput:
        self._announce(Op.STEP, batch.to_bytes() if self._world_size > 1 else b"")
        return self._engine.train_step(batch)

    def state_bits(self) -> dict[str, NDArray[Any]]:
        self._announce(Op.STATE)
        return self._engine.state_bits()

    def save(self, directory: Path, client_state: dict[str, Any]) -> None:
        self._announce(Op.SAVE, json.dumps([str(directory), client_state]).encode())
        self._engine.save(directory, client_state)

    def load(self, directory: Path) -> dict[str, Any]:
        self._announce(Op.LOAD, json.dumps(str(directory)).encode())
        return self._engine.load(directory)

    def stop(self) -> None:
        """Let the other ranks end. One that has ended by itself is no error here: it would hide the one that led to it,
        and its exit code."""
        with contextlib.suppress(RuntimeError):
            self._announce(Op.STOP)

    def _announce(self, op: Op, payload: bytes = b"") -> None:
        if self._world_size > 1:
            broadcast_bytes(bytes([op]) + payload)


def follow(engine: LearnerEngine) -> None:
    """What ranks above 0 do: take part in whatever rank 0 announces, until it says stop."""
    while True:
        message = broadcast_bytes(None)
        op, payload = Op(message[0]), message[1:]
        if op is Op.STEP:
            engine.train_step(TrainBatch.from_bytes(payload))
        elif op is Op.STATE:
            engine.state_bits()
        elif op is Op.SAVE:
            directory, client_state = json.loads(payload)
            engine.save(Path(directory), client_state)
        elif op is Op.LOAD:
            engine.load(Path(json.loads(payload)))
        else:
            return
