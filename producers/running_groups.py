"""The groups that the engine samples, and when each of them ends. No network, no disk: an engine and a clock.

Invariant: every group that is started ends, once, and by `producer.group_deadline_s`, whatever its rollouts do:

    complete    every rollout asked for is finished
    partial     its time is up, or some rollouts cannot be had, and `sampling.min_group_size` are finished: sent as it is
    given up    likewise, with fewer: the finished ones are cut too, and the index is tried again elsewhere
    lost        its lease went to somebody else, who samples it now
    stopped     this producer ends, with too few finished

A rollout that takes longer than `producer.rollout_deadline_s` is aborted and sampled again with another seed, as one is that
the engine gives up; a request that the engine does not take (an over-long prompt) is not tried again. Neither costs any
rollout but itself. An engine that does nothing but fail ends the process: handing its groups on would only use up their
attempts. Held by tests/unit/producers/test_running_groups.py.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from anabranch.producers.engine import Finished, RolloutEngine
from anabranch.producers.environments import Problem
from anabranch.producers.prompts import sample_seed
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, ConfigError
from anabranch.transport.permits import Permit

MOST_ERRORS = 3  # of one rollout of one attempt
MOST_ERRORS_IN_A_ROW = 64  # of all, with no rollout finished in between


class Ending(enum.Enum):
    COMPLETE = "complete"
    PARTIAL = "partial"
    GIVEN_UP = "given up"
    LOST = "lost"
    STOPPED = "stopped"


class SampleState(enum.Enum):
    WAITING = "waiting"  # to be given to the engine (again)
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # not tried again in this attempt


@dataclass(slots=True)
class Sample:
    """One of the G rollouts of a group."""

    number: int
    state: SampleState = SampleState.WAITING
    request_id: str = ""
    again: int = 0  # how often it was started before
    errors: int = 0
    started_s: float = 0.0
    started_ms: int = 0
    finished: Finished | None = None
    finished_ms: int = 0


@dataclass(slots=True)
class RunningGroup:
    permit: Permit
    problem: Problem
    prompt_ids: Sequence[int]
    started_s: float
    samples: list[Sample]

    @property
    def index(self) -> int:
        return self.permit.group_index

    def of(self, *states: SampleState) -> list[Sample]:
        return [sample for sample in self.samples if sample.state in states]


@dataclass(slots=True)
class Counts:
    """Since the process started; read by other threads."""

    groups: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    rollouts_aborted: int = 0  # at their own deadline
    rollouts_failed: int = 0  # given up, or not taken, by the engine
    rollouts_retried: int = 0
    rollouts_cut: int = 0  # unfinished when their group ended
    tokens_cut: int = 0  # sampled for rollouts that were aborted or cut


class RunningGroups:
    """Used by the engine's thread; `len` and `counts` may be read by others."""

    def __init__(
        self,
        engine: RolloutEngine,
        config: RunConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._engine, self._config, self._clock, self._clock_ms = engine, config, clock, clock_ms
        self._size = config.sampling.group_size
        self._enough = config.sampling.min_group_size or self._size
        self._groups: dict[int, RunningGroup] = {}
        self._requests: dict[str, tuple[RunningGroup, Sample]] = {}
        self._errors_in_a_row = 0
        self.counts = Counts()
        self._log = structlog.get_logger()

    def __len__(self) -> int:
        return len(self._groups)

    def start(self, permit: Permit, problem: Problem, prompt_ids: Sequence[int]) -> None:
        """Give all rollouts of a group to the engine. Raises as `turn`."""
        samples = [Sample(number) for number in range(self._size)]
        group = RunningGroup(permit, problem, prompt_ids, self._clock(), samples)
        self._groups[group.index] = group
        self._submit(group)

    def take(self, finished: Finished) -> bool:
        """Note a finished request. False if it is none of ours (or was aborted meanwhile). Raises as `turn`."""
        group, sample = self._requests.pop(finished.request_id, (None, None))
        if group is None or sample is None:
            return False
        if finished.complete:
            sample.finished, sample.finished_ms, sample.state = finished, self._clock_ms(), SampleState.FINISHED
            self._errors_in_a_row = 0
        else:
            sample.errors += 1
            self._again(sample)
            self._failed(group, sample, AnabranchError(f"the engine ended a request with {finished.finish_reason!r}"))
            if sample.errors >= MOST_ERRORS:
                sample.state = SampleState.FAILED
        return True

    def turn(self, *, lost: Collection[int] = (), may_submit: bool = True) -> Iterator[tuple[RunningGroup, Ending]]:
        """The groups that have ended. Aborts rollouts that are overdue and starts those again that may be.

        Args:
            lost: groups whose lease went to somebody else.
            may_submit: whether the engine may be given requests now (not while an update waits for it to be empty).

        Raises:
            ConfigError, AnabranchError: of the last of `MOST_ERRORS_IN_A_ROW` requests, none of which the engine finished.
        """
        for group in list(self._groups.values()):
            ending = Ending.LOST if group.index in lost else self._ending(group)
            if ending is None and may_submit:
                self._submit(group)
            elif ending is not None:
                self._end(group, ending)
                yield group, ending

    def stop(self, *, send_partial: bool) -> Iterator[tuple[RunningGroup, Ending]]:
        """End every group now: partial if that is wanted and enough is finished, else stopped."""
        for group in list(self._groups.values()):
            enough = len(group.of(SampleState.FINISHED)) >= self._enough
            ending = Ending.PARTIAL if enough and send_partial else Ending.STOPPED
            self._end(group, ending)
            yield group, ending

    def _ending(self, group: RunningGroup) -> Ending | None:
        now = self._clock()
        finished = len(group.of(SampleState.FINISHED))
        if finished == self._size:
            return Ending.COMPLETE
        open_samples = group.of(SampleState.RUNNING, SampleState.WAITING)
        if not open_samples or now - group.started_s > self._config.producer.group_deadline_s:
            return Ending.PARTIAL if finished >= self._enough else Ending.GIVEN_UP
        limit_s = self._config.producer.rollout_deadline_s
        overdue = [s for s in open_samples if s.state is SampleState.RUNNING and now - s.started_s > limit_s]
        if overdue:
            tokens = self._abort(overdue)
            self.counts.rollouts_aborted += len(overdue)
            self._log.warning(
                "rollouts aborted at their deadline",
                group=group.index, attempt=group.permit.attempt, samples=[s.number for s in overdue],
                started_before=[s.again for s in overdue], tokens=tokens, deadline_s=limit_s,
            )  # fmt: skip
            for sample in overdue:
                self._again(sample)
        return None

    def _again(self, sample: Sample) -> None:
        sample.state = SampleState.WAITING
        sample.again += 1

    def _submit(self, group: RunningGroup) -> None:
        for sample in group.of(SampleState.WAITING):
            permit, run_seed = group.permit, self._config.run.seed
            seed = sample_seed(
                run_seed, "train", group.index, sample.number, attempt=permit.attempt, again=sample.again
            )
            sample.request_id = f"{group.index}.{sample.number}.{permit.attempt}.{sample.again}"
            sample.started_s, sample.started_ms = self._clock(), self._clock_ms()
            try:
                self._engine.submit(sample.request_id, group.prompt_ids, seed=seed)
            except ValueError as error:  # a ConfigError, or vLLM's own word for a request that it does not take
                sample.state = SampleState.FAILED
                self._failed(group, sample, error)
                continue
            sample.state = SampleState.RUNNING
            self._requests[sample.request_id] = (group, sample)
            self.counts.rollouts_retried += sample.again > 0

    def _failed(self, group: RunningGroup, sample: Sample, error: Exception) -> None:
        self.counts.rollouts_failed += 1
        self._errors_in_a_row += 1
        self._log.warning(
            "a rollout failed",
            group=group.index, attempt=group.permit.attempt, sample=sample.number, prompt_tokens=len(group.prompt_ids),
            error=str(error),
        )  # fmt: skip
        if self._errors_in_a_row >= MOST_ERRORS_IN_A_ROW:
            kind = ConfigError if isinstance(error, ConfigError) else AnabranchError
            raise kind(f"{self._errors_in_a_row} requests in a row have failed; the last one: {error}") from error

    def _abort(self, samples: Sequence[Sample]) -> list[int]:
        """Returns how many tokens each had."""
        had = self._engine.abort([sample.request_id for sample in samples])
        for sample in samples:
            self._requests.pop(sample.request_id, None)
        tokens = [had.get(sample.request_id, 0) for sample in samples]
        self.counts.tokens_cut += sum(tokens)
        return tokens

    def _end(self, group: RunningGroup, ending: Ending) -> None:
        del self._groups[group.index]
        self.counts.groups[ending] += 1
        if ending is Ending.COMPLETE:
            return
        tokens = self._abort(group.of(SampleState.RUNNING))
        finished = [sample.finished for sample in group.of(SampleState.FINISHED) if sample.finished]
        self.counts.rollouts_cut += self._size - len(finished)
        if ending in (Ending.GIVEN_UP, Ending.PARTIAL):  # who asks whether long ones are cut more often finds it here
            self._log.warning(
                f"group {ending.value}",
                group=group.index, attempt=group.permit.attempt, seconds=round(self._clock() - group.started_s, 1),
                finished_tokens=[len(f.token_ids) for f in finished], finish_reasons=[f.finish_reason for f in finished],
                cut_tokens=tokens, waiting=len(group.of(SampleState.WAITING)), failed=len(group.of(SampleState.FAILED)),
            )  # fmt: skip
        else:
            self._log.info(f"group {ending.value}", group=group.index, attempt=group.permit.attempt)
