"""When a group ends, and as what: over an engine and a clock that do as they are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from anabranch.producers.engine import Finished
from anabranch.producers.prompts import sample_seed
from anabranch.producers.running_groups import MOST_ERRORS, MOST_ERRORS_IN_A_ROW, Ending, RunningGroups
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, ConfigError
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.permits import Permit

POLICY = PolicyVersion(1, 0)
SIZE = 4


class Lab:
    """Groups of four; a rollout may take 10 s, a group 25 s; two rollouts are enough where `partial`."""

    def __init__(self, *, partial: bool = True) -> None:
        self.now_s = 100.0
        self.running: dict[str, int] = {}  # request id -> seed
        self.seeds: list[int] = []
        self.refuse: Exception | None = None
        config = RunConfig.model_validate(
            {
                "sampling": {"group_size": SIZE, "min_group_size": 2 if partial else None},
                "producer": {"rollout_deadline_s": 10.0, "group_deadline_s": 25.0},
                "run": {"seed": 7},
            }
        )
        engine = cast(Any, self)
        self.groups = RunningGroups(engine, config, clock=lambda: self.now_s, clock_ms=lambda: int(self.now_s * 1000))

    def submit(self, request_id: str, prompt_ids: Sequence[int], *, seed: int) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert request_id not in self.running
        self.running[request_id] = seed
        self.seeds.append(seed)

    def abort(self, request_ids: Iterable[str]) -> dict[str, int]:
        return {r: 5 for r in request_ids if self.running.pop(r, None) is not None}

    def start(self, index: int = 3, attempt: int = 0) -> None:
        self.groups.start(Permit(index, attempt, POLICY), cast(Any, "problem"), [1, 2, 3])

    def finish(self, *samples: int, index: int = 3, reason: str = "stop") -> None:
        for request_id in list(self.running):
            group, sample, *_ = map(int, request_id.split("."))
            if group == index and sample in samples:
                del self.running[request_id]
                spans = (VersionSpan(POLICY, 0),)
                done = Finished(request_id, np.ones(3, np.int32), np.zeros(3, np.float32), spans, reason, "x")
                assert self.groups.take(done)

    def turn(self, after_s: float = 0.0, **how: Any) -> list[tuple[int, Ending, list[int]]]:
        """(group index, ending, samples that are finished)."""
        self.now_s += after_s
        return [
            (group.index, ending, [s.number for s in group.samples if s.finished])
            for group, ending in self.groups.turn(**how)
        ]


def test_a_group_is_complete_with_its_last_rollout() -> None:
    lab = Lab()
    lab.start()
    lab.finish(0, 2, 3)
    assert lab.turn() == []
    lab.finish(1)
    assert lab.turn() == [(3, Ending.COMPLETE, [0, 1, 2, 3])]
    assert (len(lab.groups), lab.running, lab.turn()) == (0, {}, [])


def test_an_overdue_rollout_is_sampled_again_with_another_seed_and_costs_no_other() -> None:
    lab = Lab()
    lab.start()
    lab.finish(0)
    assert lab.turn(9) == []
    lab.finish(1, 3)
    first = dict(lab.running)
    assert lab.turn(1.5) == []
    assert list(first) == ["3.2.0.0"]
    assert list(lab.running) == ["3.2.0.1"]
    assert not set(first.values()) & set(lab.running.values())
    lab.finish(2)
    assert lab.turn() == [(3, Ending.COMPLETE, [0, 1, 2, 3])]
    assert (lab.groups.counts.rollouts_aborted, lab.groups.counts.rollouts_retried) == (1, 1)
    assert lab.groups.counts.tokens_cut == 5


def test_a_group_at_its_deadline_goes_as_it_is_when_enough_is_finished() -> None:
    lab = Lab()
    lab.start()
    lab.finish(1, 3)
    assert lab.turn(11) == []
    assert lab.turn(11) == []
    with capture_logs() as said:
        assert lab.turn(3.5) == [(3, Ending.PARTIAL, [1, 3])]
    assert lab.running == {}, "the engine works on nothing nobody waits for"
    (line,) = [entry for entry in said if entry["event"] == "group partial"]
    assert (line["finish_reasons"], line["finished_tokens"], line["cut_tokens"]) == (["stop", "stop"], [3, 3], [5, 5])
    assert lab.groups.counts.rollouts_cut == 2


@pytest.mark.parametrize(("partial", "finished"), [(True, (0,)), (False, (0, 1, 2))])
def test_with_too_few_it_is_given_up(partial: bool, finished: tuple[int, ...]) -> None:
    lab = Lab(partial=partial)
    lab.start()
    lab.finish(*finished)
    assert lab.turn(25.5) == [(3, Ending.GIVEN_UP, list(finished))]
    assert (lab.running, len(lab.groups)) == ({}, 0)


def test_a_straggler_delays_no_other_group() -> None:
    lab = Lab()
    lab.start(3)
    lab.start(4)
    lab.finish(0, 1, 2, 3, index=4)
    assert lab.turn() == [(4, Ending.COMPLETE, [0, 1, 2, 3])]


def test_what_the_engine_gives_up_is_tried_again_a_few_times() -> None:
    lab = Lab()
    lab.start()
    lab.finish(0, 1)
    for again in range(MOST_ERRORS):
        assert [r for r in lab.running if r.startswith("3.2")] == [f"3.2.0.{again}"]
        lab.finish(2, reason="error")
        assert lab.turn() == []
    assert not [r for r in lab.running if r.startswith("3.2")]
    lab.finish(3)
    assert lab.turn() == [(3, Ending.PARTIAL, [0, 1, 3])], "there is nothing to wait for"
    assert lab.groups.counts.rollouts_failed == MOST_ERRORS


def test_a_prompt_that_the_engine_refuses_is_given_up_at_once_and_costs_nobody_else() -> None:
    lab = Lab()
    lab.start(4)
    lab.refuse = ConfigError("a prompt of 900 tokens does not fit")
    lab.start(3)
    lab.refuse = None
    assert lab.turn() == [(3, Ending.GIVEN_UP, [])]
    assert len(lab.running) == SIZE


def test_an_engine_that_only_fails_ends_the_process_instead_of_using_up_every_groups_attempts() -> None:
    lab = Lab()
    lab.refuse = ConfigError("does not fit")
    for index in range(MOST_ERRORS_IN_A_ROW // SIZE - 1):
        lab.start(index)
        assert lab.turn() == [(index, Ending.GIVEN_UP, [])]
    with pytest.raises(ConfigError, match="requests in a row have failed; the last one: does not fit"):
        lab.start(99)
    assert lab.groups.counts.rollouts_failed == MOST_ERRORS_IN_A_ROW


def test_failures_between_successes_end_nothing() -> None:
    lab = Lab()
    for index in range(MOST_ERRORS_IN_A_ROW):
        lab.start(index)
        lab.finish(0, index=index, reason="abort")
        lab.finish(1, 2, 3, index=index)
        lab.turn()
        lab.finish(0, index=index)
        assert lab.turn() == [(index, Ending.COMPLETE, [0, 1, 2, 3])]


def test_an_engine_that_is_broken_is_no_failed_rollout() -> None:
    lab = Lab()
    lab.refuse = AnabranchError("the engine is broken")
    with pytest.raises(AnabranchError, match="broken"):
        lab.start()


def test_a_lost_group_is_let_go_even_if_it_has_just_finished() -> None:
    lab = Lab()
    lab.start(3)
    lab.start(4)
    lab.finish(0, 1, 2, 3)
    assert lab.turn(lost={3, 99}) == [(3, Ending.LOST, [0, 1, 2, 3])]
    assert {r.split(".")[0] for r in lab.running} == {"4"}


def test_nothing_is_started_again_while_an_update_waits_for_the_engine_to_be_empty() -> None:
    lab = Lab()
    lab.start()
    assert lab.turn(11, may_submit=False) == []
    assert lab.running == {}
    assert lab.turn() == []
    assert len(lab.running) == SIZE


@pytest.mark.parametrize(("send", "finished", "ending"), [
    (True, (0, 1), Ending.PARTIAL), (True, (0,), Ending.STOPPED), (False, (0, 1), Ending.STOPPED),
])  # fmt: skip
def test_a_stop_ends_every_group_now(send: bool, finished: tuple[int, ...], ending: Ending) -> None:
    lab = Lab()
    lab.start()
    lab.finish(*finished)
    assert [(group.index, how) for group, how in lab.groups.stop(send_partial=send)] == [(3, ending)]
    assert (lab.running, len(lab.groups)) == ({}, 0)


def test_requests_of_others_and_of_aborted_rollouts_are_not_its_own() -> None:
    lab = Lab()
    lab.start()
    (old,) = [r for r in lab.running if r.startswith("3.0")]
    lab.turn(11)
    late = Finished(old, np.ones(1, np.int32), np.zeros(1, np.float32), (VersionSpan(POLICY, 0),), "stop", "x")
    assert not lab.groups.take(late)
    lab.finish(1, 2, 3)
    assert lab.turn() == []


def test_the_first_attempt_has_the_seeds_of_a_run_without_failures() -> None:
    lab = Lab()
    lab.start(5)
    assert lab.seeds == [sample_seed(7, "train", 5, sample) for sample in range(SIZE)]


def test_a_further_attempt_at_a_group_repeats_no_seed() -> None:
    lab = Lab()
    for attempt in range(3):
        lab.start(5, attempt)
        assert lab.turn(11) == []
        lab.finish(0, 1, 2, 3, index=5)
        lab.turn()
    assert len(set(lab.seeds)) == len(lab.seeds) == 3 * 2 * SIZE


@given(
    st.lists(
        st.tuples(st.sampled_from(["stop", "length", "error", "time"]), st.integers(0, 1), st.integers(0, SIZE - 1)),
        max_size=30,
    )
)
def test_whatever_happens_a_group_ends_once_and_by_its_deadline(events: list[tuple[str, int, int]]) -> None:
    lab = Lab()
    lab.start(0)
    lab.start(1)
    ended: list[int] = []
    for kind, index, sample in events:
        if kind == "time":
            lab.now_s += 3 * (1 + sample)
        else:
            lab.finish(sample, index=index, reason=kind)
        ended += [index for index, *_ in lab.turn()]
        assert len(ended) == 2 or lab.now_s < 100 + 25 + 0.01
        assert len(lab.running) <= SIZE * len(lab.groups)
    ended += [index for index, *_ in lab.turn(26)]
    assert sorted(ended) == [0, 1]
    assert lab.running == {}
    assert sum(lab.groups.counts.groups.values()) == 2
