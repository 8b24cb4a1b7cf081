"""The synchronous loop in the fewest lines: sample B groups, train on them, load the weights, repeat.

No Redis, no permits, no channel, no ages. `max_age = 0` must give the same weights bit for bit. Prints one JSON list:
the digest of version 0, 1, 2, ... usage: reference_loop.py CONFIG.toml

vLLM and DeepSpeed each want torch's default process group, so sampling runs in a child of its own.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.schemas.config import load_config
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion

config = load_config(Path(sys.argv[1]).read_text())
sampler: dict[str, Any] = {}  # the child's engine, prompts and mirror


def load() -> None:
    from anabranch.producers.engine import RolloutEngine
    from anabranch.producers.environments import Task
    from anabranch.producers.mirror import Mirror, layout_of_checkpoint
    from anabranch.producers.service import TaskPrompts, load_tokenizer

    sampler["engine"] = RolloutEngine(config.model.path, config.producer, config.sampling, seed=config.run.seed)
    sampler["prompts"] = TaskPrompts(Task(config.task, config.run.seed), load_tokenizer(config.model.path), config)
    sampler["mirror"] = Mirror(layout_of_checkpoint(config.model.path))


def serve(version: int, state: dict[str, Any]) -> str:
    mirror = sampler["mirror"]
    for name, bits in state.items():
        mirror.write(name, None, bits)
    sampler["engine"].swap(mirror, PolicyVersion(1, version), dict.fromkeys(mirror.layout.by_name))
    return str(mirror.digest())


def sample(indices: range) -> list[Group]:
    from anabranch.producers.prompts import sample_seed

    engine, prompts = sampler["engine"], sampler["prompts"]
    problems = {index: prompts.training(index) for index in indices}
    for index, (_, ids) in problems.items():
        for n in range(config.sampling.group_size):
            engine.submit(f"{index}.{n}", ids, seed=sample_seed(config.run.seed, "train", index, n))
    done = {}
    while engine.has_unfinished:
        done |= {f.request_id: f for f in engine.step()}

    def rollout(index: int, n: int) -> Rollout:
        f, problem = done[f"{index}.{n}"], problems[index][0]
        reward = prompts.score(problem, f.text)
        return Rollout(n, f.token_ids, f.logprobs, f.spans, reward, f.finish_reason, f.text, 0, 0)

    return [
        Group(
            run=config.run.name,
            region="east",
            producer="reference",
            group_index=index,
            attempt=0,
            prompt_token_ids=np.asarray(ids, np.int32),
            prompt_text=problem.prompt_text,
            answer=problem.answer,
            rollouts=tuple(rollout(index, n) for n in range(config.sampling.group_size)),
        )
        for index, (problem, ids) in problems.items()
    ]


def main() -> None:
    from anabranch.learner.batch import build_batch
    from anabranch.learner.engine import LearnerEngine

    learner = LearnerEngine(
        config.model.path,
        config.learner,
        config.correction,
        run_seed=config.run.seed,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
    )
    batch = config.learner.groups_per_step
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        child.submit(load).result()
        digests = [child.submit(serve, 0, learner.state_bits()).result()]
        for step in range(config.learner.steps):
            groups = child.submit(sample, range(step * batch, (step + 1) * batch)).result()
            learner.train_step(build_batch(groups, now=PolicyVersion(1, step), forks={}, max_age=0))
            digests.append(child.submit(serve, step + 1, learner.state_bits()).result())
    print(json.dumps(digests))


if __name__ == "__main__":
    main()
