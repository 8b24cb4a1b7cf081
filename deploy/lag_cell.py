"""One run of the lag study: a preset trained in this process on groups that are always a given number of versions old.

Invariant: a cell is a function of its configuration, lag and seed alone, bit for bit on one machine; at step v every token of its
batch was sampled by version v − lag (in the first steps by version 0), by the weights as they are published. Prompts and the
numbers that tokens are drawn with depend on the seed and the place in the run, so cells of one seed are paired. Held by
tests/unit/deploy/test_lag_cell.py.

Everything between sampling and the next weights is that of a run: `build_batch`, `LearnerEngine.train_step`. What is missing is what a
study of age must not have: engines, queues, and chance in how old a group is.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.deploy.lag_measures import CellResult, Measuring
from anabranch.deploy.lag_sampler import Bits, Completion, Sampler
from anabranch.learner.batch import TrainBatch, build_batch
from anabranch.learner.engine import LearnerEngine
from anabranch.producers.environments import Task
from anabranch.producers.prompts import Prompts, sample_seed
from anabranch.producers.service import TaskPrompts, load_tokenizer
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import GateError
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

EPOCH = 1


class LaggedRun:
    """A learner and the weights of its last `lag` + 1 versions."""

    def __init__(self, config: RunConfig, lag: int) -> None:
        """Raises ConfigError, ModelMismatchError: as `LearnerEngine`."""
        self._config, self._lag = config, lag
        seed, sampling = config.run.seed, config.sampling
        correction = config.correction.model_copy(update={"max_age": max(lag, config.correction.max_age)})
        self.engine = LearnerEngine(
            config.model.path, config.learner, correction, config.gates, run_seed=seed, temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
        )  # fmt: skip
        self._sampler = Sampler(config.model.path, max_tokens=sampling.max_tokens)
        self._tokenizer, self._prompts = _prompts(config.model_dump_json())
        self._versions: deque[Bits] = deque([self.engine.state_bits()], maxlen=lag + 1)

    def batch(self) -> TrainBatch:
        """What the next step is trained on."""
        now = self.engine.step
        sampled = now - min(now, self._lag)
        self._sampler.load(self._versions[0])
        each, size = self._config.learner.groups_per_step, self._config.sampling.group_size
        indices = range(now * each, (now + 1) * each)
        problems = [self._prompts.training(index) for index in indices]
        done = self._sampler.sample(
            [ids for _, ids in problems], self._numbers("train", indices, size),
            temperature=self._config.sampling.temperature,
        )  # fmt: skip
        groups = [
            self._group(index, problem, ids, completions, PolicyVersion(EPOCH, sampled))
            for index, (problem, ids), completions in zip(indices, problems, done, strict=True)
        ]
        return build_batch(groups, now=PolicyVersion(EPOCH, now), forks={}, max_age=self._lag)

    def step(self, batch: TrainBatch) -> Any:
        """The production step; its `StepOutput`. Raises GateError."""
        output = self.engine.train_step(batch)
        self._versions.append(self.engine.state_bits())
        return output

    def heldout(self, samples: int, *, temperature: float) -> float:
        """Mean reward of the newest version over all held-out prompts."""
        self._sampler.load(self._versions[-1])
        indices = range(self._config.task.heldout_size)
        problems = [self._prompts.heldout(index) for index in indices]
        numbers = self._numbers("heldout", indices, samples)
        done = self._sampler.sample([ids for _, ids in problems], numbers, temperature=temperature)
        rewards = [
            self._prompts.score(problem, self._text(completion))
            for (problem, _), completions in zip(problems, done, strict=True)
            for completion in completions
        ]
        return float(np.mean(rewards))

    def _numbers(self, kind: str, indices: Sequence[int], samples: int) -> NDArray[np.float64]:
        """float64 [indices, samples, max_tokens]."""
        seed, length = self._config.run.seed, self._config.sampling.max_tokens
        return np.array(
            [
                [np.random.default_rng(sample_seed(seed, kind, i, n)).random(length) for n in range(samples)]
                for i in indices
            ]
        )

    def _group(
        self, index: int, problem: Any, ids: Sequence[int], completions: Sequence[Completion], policy: PolicyVersion
    ) -> Group:
        rollouts = []
        for n, c in enumerate(completions):
            text = self._text(c)
            reward = self._prompts.score(problem, text)
            spans = (VersionSpan(policy, 0),)
            rollouts.append(Rollout(n, c.token_ids, c.logprobs, spans, reward, c.finish_reason, text, 0, 0))
        prompt = np.asarray(ids, np.int32)
        run = self._config.run.name
        return Group(run, "study", "sampler", index, 0, prompt, problem.prompt_text, problem.answer, tuple(rollouts))

    def _text(self, completion: Completion) -> str:
        return str(self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))


def run_cell(
    config: RunConfig, lag: int, measuring: Measuring, *, tell: Callable[[str], None] = lambda _: None
) -> CellResult:
    """Train `config` (its seed, correction, learning rate, steps) at `lag`. Raises ConfigError, ModelMismatchError."""
    began = time.monotonic()
    run, steps = LaggedRun(config, lag), config.learner.steps
    result = CellResult([], [(0, run.heldout(measuring.samples, temperature=1.0))], None, [], [], [], [], [], {}, "", 0)
    alarms: Counter[str] = Counter()
    stopped = ""
    for step in range(1, steps + 1):
        batch = run.batch()
        try:
            output = run.step(batch)
        except GateError as error:
            stopped = str(error)
            break
        result.reward.append(float(batch.rewards.mean()))
        drift = output.diagnostics.total
        for series, name in ((result.ess, "ess_token"), (result.masked, "masked_fraction"), (result.kl, "kl_k3"),
                             (result.entropy, "entropy")):  # fmt: skip
            series.append(None if drift is None else _short(getattr(drift, name)))
        result.grad_norm.append(_short(output.grad_norm))
        alarms.update({alarm.gate for alarm in output.alarms})
        last = step == steps
        if last or step % measuring.every == 0:
            samples = measuring.final_samples if last else measuring.samples
            result.heldout.append((step, run.heldout(samples, temperature=1.0)))
            tell(f"step {step} of {steps}, held-out reward {result.heldout[-1][1]:.3f}")
    greedy = None if stopped else run.heldout(1, temperature=0.0)
    return CellResult(**{
        **result.as_json(), "greedy": greedy, "alarms": dict(alarms), "stopped": stopped, "seconds": round(time.monotonic() - began, 1)
    })  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@lru_cache(maxsize=4)
def _prompts(config_json: str) -> tuple[Any, Prompts]:
    """Tokenizer and prompts; the held-out set takes a while to draw. By the text, because a configuration has no hash."""
    config = RunConfig.model_validate_json(config_json)
    tokenizer = load_tokenizer(Path(config.model.path))
    return tokenizer, TaskPrompts(Task(config.task, config.run.seed), tokenizer, config)
