"""What the hub's boards promise (transport/boards.py), for every implementation."""

from __future__ import annotations

import time

import pytest

from anabranch.schemas.keys import Keys
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.memory_boards import MemoryEvaluationBoard, MemoryRunBoard
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from tests.contract.backends import BACKENDS

POLICY = PolicyVersion(2, 40)
LONG_MS = 600_000


@pytest.fixture(params=BACKENDS)
def run_board(request: pytest.FixtureRequest, keys: Keys, client_of) -> RunBoard:
    if request.param == "memory":
        return MemoryRunBoard()
    return RedisRunBoard(client_of(request.param), keys)


@pytest.fixture(params=BACKENDS)
def evaluations(request: pytest.FixtureRequest, keys: Keys, client_of) -> EvaluationBoard:
    if request.param == "memory":
        return MemoryEvaluationBoard()
    return RedisEvaluationBoard(client_of(request.param), keys)


def producer(region: str = "eu", **more) -> ProducerStatus:
    return ProducerStatus(updated_ms=1, region=region, pid=7, state="sampling", policy="e1.v2", **more)


def test_a_run_is_finished_once_and_a_new_start_takes_it_back(run_board):
    assert run_board.finished() is None
    run_board.start()
    assert run_board.finished() is None
    run_board.finish("100 steps done")
    run_board.finish("another reason")
    assert run_board.finished() == "100 steps done"
    run_board.start()
    assert run_board.finished() is None


def test_the_newest_learner_status_is_shown(run_board):
    assert run_board.learner() is None
    for step in (1, 2):
        status = LearnerStatus(
            updated_ms=5, state="waiting", waiting_for="3 groups", step=step, steps_total=9, epoch=1, version=step
        )
        run_board.report_learner(status)
    assert run_board.learner() == status


def test_producers_are_listed_until_they_fall_silent(run_board):
    assert run_board.producers() == {}
    run_board.report_producer("a", producer(tokens_per_s=1.5))
    run_board.report_producer("b", producer("us"))
    assert run_board.producers() == {"a": producer(tokens_per_s=1.5), "b": producer("us")}
    time.sleep(0.6)
    run_board.report_producer("b", producer("us", swaps=1))
    assert run_board.producers(within_ms=500) == {"b": producer("us", swaps=1)}
    assert run_board.drop_stale_producers(older_ms=500) == ["a"]
    assert run_board.drop_stale_producers(older_ms=500) == []
    assert set(run_board.producers()) == {"b"}


def test_a_verification_is_wanted_until_its_time_is_over(run_board):
    assert run_board.verification_wanted() is None
    first = run_board.request_verification()
    assert run_board.verification_wanted() == first
    second = run_board.request_verification(ttl_ms=30)
    assert second != first
    time.sleep(0.05)
    assert run_board.verification_wanted() is None


def test_nothing_to_evaluate_until_it_is_requested(evaluations):
    assert evaluations.wanted() is None
    assert evaluations.take("p", POLICY, LONG_MS) is None
    assert not evaluations.post(POLICY, 0, {"reward": 1})
    assert evaluations.results(POLICY) == {}
    evaluations.clear()


def test_shards_are_shared_out_and_their_results_come_together(evaluations):
    evaluations.request(POLICY, 3)
    assert evaluations.wanted() == (POLICY, 3)
    assert [evaluations.take(p, POLICY, LONG_MS) for p in "pqpq"] == [0, 1, 2, None]
    assert evaluations.take("p", PolicyVersion(2, 39), LONG_MS) is None
    assert evaluations.post(POLICY, 2, {"rewards": [1.0, 0.5]})
    assert evaluations.post(POLICY, 0, {"rewards": []})
    assert evaluations.results(POLICY) == {0: {"rewards": []}, 2: {"rewards": [1.0, 0.5]}}


def test_a_dead_producers_shard_goes_to_another_and_the_first_result_stays(evaluations):
    evaluations.request(POLICY, 1)
    assert evaluations.take("dead", POLICY, 500) == 0
    assert evaluations.take("alive", POLICY, LONG_MS) is None
    time.sleep(0.55)
    assert evaluations.take("alive", POLICY, LONG_MS) == 0
    assert evaluations.post(POLICY, 0, {"by": "alive"})
    assert not evaluations.post(POLICY, 0, {"by": "dead"})
    assert evaluations.take("third", POLICY, LONG_MS) is None
    assert evaluations.results(POLICY) == {0: {"by": "alive"}}


def test_a_shard_under_way_is_kept_by_renewing_it(evaluations):
    evaluations.request(POLICY, 2)
    assert evaluations.take("p", POLICY, 30) == 0
    assert evaluations.renew("p", POLICY, 0, LONG_MS)
    assert not evaluations.renew("q", POLICY, 0, LONG_MS)
    assert not evaluations.renew("p", POLICY, 1, LONG_MS)
    assert evaluations.take("q", POLICY, LONG_MS) == 1
    time.sleep(0.04)
    assert evaluations.take("q", POLICY, LONG_MS) is None
    assert evaluations.post(POLICY, 0, {"x": 1})
    assert not evaluations.renew("p", POLICY, 0, LONG_MS), "it has its result"
    assert evaluations.results(POLICY) == {0: {"x": 1}}


def test_a_lease_written_before_the_clock_stepped_back_does_not_hold_a_shard_for_ever(evaluations):
    evaluations.request(POLICY, 1)
    assert evaluations.take("dead", POLICY, 10 * LONG_MS) == 0
    assert evaluations.take("alive", POLICY, LONG_MS) == 0


def test_a_shard_out_of_range_is_not_stored(evaluations):
    evaluations.request(POLICY, 2)
    assert not evaluations.post(POLICY, 2, {"x": 1})
    assert not evaluations.post(POLICY, -1, {"x": 1})


def test_a_cleared_evaluation_leaves_nothing_and_late_results_are_refused(evaluations):
    evaluations.request(POLICY, 1)
    evaluations.post(POLICY, 0, {"x": 1})
    evaluations.clear()
    assert evaluations.wanted() is None
    assert evaluations.results(POLICY) == {}
    assert not evaluations.post(POLICY, 0, {"x": 1})
    evaluations.request(POLICY, 1)
    assert evaluations.take("p", POLICY, LONG_MS) == 0
