"""The training engine of all ranks behind the interface of one.

Invariant: rank 0 decides, the others follow. Every collective method first broadcasts what is about to happen (one
opcode and its bytes), so all ranks enter it together and a loop that knows nothing of ranks can drive any number of
them. `follow` returns only when rank 0 says stop; a rank 0 that dies ends the others through the process group's
time-out and the parent-death signal. Of a batch a rank above 0 is sent its own share alone. Held by
tests/e2e/test_learner_engine.py and tests/e2e/test_rank_splits.py.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from anabranch.learner.batch import TrainBatch
from anabranch.learner.distribute import broadcast_bytes, receive_bytes, send_bytes
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.publish_order import EpochOpening, PublishOrder
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.step import StepOutput, StepShare
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.layout import Layout


class Op(enum.IntEnum):
    STEP = 1
    STATE = 2
    SAVE = 3
    LOAD = 4
    OPEN_EPOCH = 5
    PUBLISH = 6
    STOP = 7


MakePublisher = Callable[[LearnerEngine, EpochOpening], WeightPublisher]


def _no_publisher(engine: LearnerEngine, opening: EpochOpening) -> WeightPublisher:
    raise AnabranchError("this engine was made without a publisher")


class CollectiveEngine:
    """Rank 0's view. `make_publisher` makes its own publisher; each of the others makes one when an epoch opens."""

    def __init__(
        self, engine: LearnerEngine, *, world_size: int, make_publisher: MakePublisher = _no_publisher
    ) -> None:
        self._engine, self._world_size, self._make_publisher = engine, world_size, make_publisher

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

    def train_step(self, batch: TrainBatch, order: RecordOrder | None = None) -> StepOutput:
        """One step on `batch`, which every rank records as `order` says. Raises as `LearnerEngine.train_share`."""
        shares = self._engine.plan(batch)
        self._announce(Op.STEP, b"" if order is None else order.to_bytes())
        for rank in range(1, self._world_size):
            send_bytes(shares[rank].to_bytes(), rank)
        return self._engine.train_share(shares[0], order)

    def state_bits(self) -> dict[str, NDArray[Any]]:
        self._announce(Op.STATE)
        return self._engine.state_bits()

    def save(self, directory: Path, client_state: dict[str, Any]) -> None:
        self._announce(Op.SAVE, json.dumps([str(directory), client_state]).encode())
        self._engine.save(directory, client_state)

    def load(self, directory: Path) -> dict[str, Any]:
        self._announce(Op.LOAD, json.dumps(str(directory)).encode())
        return self._engine.load(directory)

    def open_epoch(self, opening: EpochOpening) -> WeightPublisher:
        """Have every rank publish its share of the present weights as the epoch's first version; returns rank 0's
        publisher, whose `flush` waits for all."""
        self._announce(Op.OPEN_EPOCH, opening.to_bytes())
        publisher = self._make_publisher(self._engine, opening)
        publisher.open()
        return publisher

    def publish(self, publisher: WeightPublisher, version: int) -> float:
        """Have every rank publish its share of the present weights as `version`; returns how long the copying took, and
        the wait for the version before (seconds). Raises as `WeightPublisher.publish`."""
        publisher.check()  # before the others wait for us in it
        order = publisher.next_order(version)
        self._announce(Op.PUBLISH, order.to_bytes())
        return publisher.publish(order)

    def stop(self) -> None:
        """Let the other ranks end. One that has ended by itself is no error here: it would hide the one that led to it,
        and its exit code."""
        with contextlib.suppress(RuntimeError):
            self._announce(Op.STOP)

    def _announce(self, op: Op, payload: bytes = b"") -> None:
        if self._world_size > 1:
            broadcast_bytes(bytes([op]) + payload)


def follow(engine: LearnerEngine, make_publisher: MakePublisher = _no_publisher) -> None:
    """What ranks above 0 do: take part in whatever rank 0 announces, until it says stop. Raises what this rank's part of
    publishing has failed with."""
    publisher: WeightPublisher | None = None
    try:
        while True:
            message = broadcast_bytes(None)
            op, payload = Op(message[0]), message[1:]
            if op is Op.STEP:
                order = RecordOrder.from_bytes(payload) if payload else None
                engine.train_share(StepShare.from_bytes(receive_bytes()), order)
            elif op is Op.STATE:
                engine.state_bits()
            elif op is Op.SAVE:
                directory, client_state = json.loads(payload)
                engine.save(Path(directory), client_state)
            elif op is Op.LOAD:
                engine.load(Path(json.loads(payload)))
            elif op is Op.OPEN_EPOCH:
                publisher = make_publisher(engine, EpochOpening.from_bytes(payload))
                publisher.open()
            elif op is Op.PUBLISH:
                assert publisher is not None, "rank 0 opens an epoch first"
                publisher.publish(PublishOrder.from_bytes(payload))
            else:
                if publisher is not None:
                    publisher.check()  # rank 0 may end because of what failed here
                return
    finally:
        if publisher is not None:
            publisher.close()
