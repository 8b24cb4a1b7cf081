"""An evaluation is complete or it is none, and whatever a producer posts is checked."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from anabranch.learner.evaluation import evaluate
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import DeadlineError, WireError
from anabranch.schemas.metrics import EvaluationRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.wiring import Hub

POLICY = PolicyVersion(1, 4)


def config(size: int = 20, deadline_s: float = 10) -> RunConfig:
    return load_config("", overrides=[f"task.heldout_size={size}", f"learner.evaluate_deadline_s={deadline_s}"])


def hub() -> Hub:
    world = MemoryWorld("run", ["east"])
    return Hub(channel=world.channel(), permits=world.permits, runs=world.runs, evaluations=world.evaluations)


def producer(board: Any, result: Any, shards: list[int] | None = None) -> threading.Thread:
    """Evaluates shards (all, or the first few) by `result(shard, shards)`, like a producer would."""

    def work() -> None:
        while (wanted := board.wanted()) is None:
            pass
        while (shard := board.take("p", wanted[0], 60_000)) is not None:
            if shards is None or shard in shards:
                board.post(wanted[0], shard, {"rewards": result(shard, wanted[1])})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def rewards(shard: int, shards: int) -> list[float]:
    return [float(index % 4 == 0) for index in range(shard, 20, shards)]


def run(hub: Hub, **settings: Any) -> EvaluationRecord | None:
    return evaluate(hub, config(**settings), POLICY)


def test_the_mean_covers_every_held_out_prompt() -> None:
    board = hub()
    producer(board.evaluations, rewards)
    record = run(board)
    assert record is not None
    assert (record.prompts, record.version, record.epoch) == (20, 4, 1)
    assert record.mean_reward == pytest.approx(5 / 20)
    assert record.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 * 20 / 19 / 20))
    assert board.evaluations.wanted() is None, "nothing is asked for any more"


def test_a_shard_that_never_comes_ends_at_the_deadline_and_says_how_many_came() -> None:
    board = hub()
    producer(board.evaluations, rewards, shards=[0, 1, 2])
    with pytest.raises(DeadlineError, match="3 of 8 shards"):
        run(board, deadline_s=2)


@pytest.mark.parametrize("bad", [[1.0], [], "high", [math.nan] * 3, [True] * 3, [None] * 3], ids=repr)
def test_a_result_that_is_no_list_of_finite_rewards_is_refused(bad: Any) -> None:
    board = hub()
    producer(board.evaluations, lambda shard, shards: bad if shard == 0 else rewards(shard, shards))
    with pytest.raises(WireError, match="shard 0"):
        run(board)


def test_a_stop_ends_the_wait_and_takes_the_request_back() -> None:
    board = hub()
    assert evaluate(board, config(), POLICY, should_stop=lambda: True) is None
    assert board.evaluations.wanted() is None, "producers would sample it for nobody"
