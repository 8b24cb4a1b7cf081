"""`anabranch bench resume`: a learner that resumes against one that never stopped, bit for bit.

Invariant: each comparison is between two processes: one trains straight and saves at steps drawn from a seed, another loads
each of its checkpoints into a new engine and trains on to the end; losses are compared as they are, weights by digest, after
every step. Held by tests/e2e/test_resume.py. Run as a program it is one rank of either: `python -m
anabranch.learner.bench_resume JOB.json`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from anabranch.learner.batch import TrainBatch
from anabranch.learner.bench_publish import random_batch
from anabranch.learner.checkpoint import CheckpointStore
from anabranch.learner.collective import CollectiveEngine, follow
from anabranch.learner.distribute import leave_ranks, rank_from_environment
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.launch import launch_ranks
from anabranch.schemas.config import LearnerSection, RunConfig, dump_toml, load_config
from anabranch.schemas.errors import AnabranchError

RUN = "bench-resume"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`losses`, `weights`: of so many steps after a resume, `equal_...` are the same bits. `resumed_at`: after these steps.
    `changes`: steps of the straight run that changed the weights."""

    stage: int
    ranks: int
    dtype: str
    compute_dtype: str
    steps: int
    changes: int
    resumed_at: tuple[int, ...]
    losses: int
    equal_losses: int
    weights: int
    equal_weights: int

    @property
    def equal(self) -> bool:
        compared = min(self.losses, self.weights, self.changes) > 0
        return compared and self.losses == self.equal_losses and self.weights == self.equal_weights


def bench_resume(
    config: RunConfig,
    *,
    stages: Sequence[int],
    ranks: Sequence[int],
    steps: int,
    resumes: int,
    seed: int,
    tell: Callable[[str], object],
) -> Iterator[Comparison]:
    """One comparison for each number of ranks and stage: `steps` steps on random batches, resumed after `resumes` of them.

    Raises AnabranchError: a rank failed; what it said is on stderr.
    """
    for number in ranks:
        with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder:
            job: dict[str, Any] = {"folder": folder, "steps": steps, "runs": []}
            for stage in stages:
                draw = random.Random(f"{seed} {stage} {number}")  # noqa: S311 - which steps, not a secret
                learner = config.learner.model_copy(update={"zero_stage": stage, "world_size": number})
                text = dump_toml(config.model_copy(update={"learner": learner}))
                job["runs"].append(
                    {"config": text, "stage": stage, "at": sorted(draw.sample(range(1, steps), resumes))}
                )
            who = f"{number} rank{'s' if number > 1 else ''}"
            tell(f"{who}: straight, {steps} steps at {len(stages)} stages")
            straight = _launch(job | {"resume": False}, number)
            tell(f"{who}: resumed {resumes} times at each")
            resumed = _launch(job | {"resume": True}, number)
        for run in job["runs"]:
            name = str(run["stage"])
            yield _compare(load_config(run["config"]).learner, tuple(run["at"]), straight[name], resumed[name])


def as_json(comparison: Comparison) -> dict[str, Any]:
    return asdict(comparison) | {"equal": comparison.equal}


def _compare(
    learner: LearnerSection, at: tuple[int, ...], straight: dict[str, Any], resumed: dict[str, Any]
) -> Comparison:
    """`straight`: step -> what is there after it; `resumed`: step resumed after -> the same."""
    digests = [straight[str(step)]["weights"] for step in range(len(straight))]
    pairs = [(straight[step], found) for run in resumed.values() for step, found in run.items()]
    trained = [(a, b) for a, b in pairs if "loss" in b]
    return Comparison(
        learner.zero_stage, learner.world_size, learner.dtype, learner.resolved_compute_dtype,
        steps=len(straight) - 1, changes=sum(a != b for a, b in itertools.pairwise(digests)), resumed_at=at,
        losses=len(trained), equal_losses=sum(a["loss"] == b["loss"] for a, b in trained),
        weights=len(pairs), equal_weights=sum(a["weights"] == b["weights"] for a, b in pairs),
    )  # fmt: skip


def _launch(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Stage -> what the processes of that job found."""
    folder = Path(job["folder"])
    (folder / "job.json").write_text(json.dumps(job))
    code = launch_ranks(ranks, [sys.executable, "-I", "-m", "anabranch.learner.bench_resume", str(folder / "job.json")])
    if code:
        raise AnabranchError(f"a learner of {ranks} ranks ended with {code}; its output is above")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _digest(engine: CollectiveEngine) -> str:
    digest = xxhash.xxh3_128()
    for name, bits in sorted(engine.state_bits().items()):
        digest.update(name.encode())
        digest.update(bits.tobytes())
    return digest.hexdigest()


def _engines(config: RunConfig) -> Generator[CollectiveEngine]:
    """New engines, one after the other, on rank 0; on the others their part in them."""
    rank, world_size = rank_from_environment() or (0, 1)
    while True:
        made = LearnerEngine(
            config.model.path, config.learner, config.correction, config.gates, run_seed=config.run.seed,
            temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens,
            rank=rank, world_size=world_size,
        )  # fmt: skip
        engine = CollectiveEngine(made, world_size=world_size)
        try:
            if rank:
                follow(made)
            yield engine
        finally:
            if not rank:
                engine.stop()


def _run(config: RunConfig, at: list[int], steps: int, folder: Path, *, resume: bool) -> dict[str, Any]:
    def batch(step: int) -> TrainBatch:
        run = config.run.model_copy(update={"seed": config.run.seed + step})
        return random_batch(config.model_copy(update={"run": run}), engine.vocabulary)

    def store(step: int) -> CheckpointStore:
        return CheckpointStore(folder / f"after-{step}", run=RUN, layout_hash=engine.layout.hash, keep=1)

    found: dict[str, Any] = {}
    follows = (rank_from_environment() or (0, 1))[0] > 0
    with contextlib.closing(_engines(config)) as engines:
        for start, engine in zip(at if resume else [0], engines, strict=False):
            if follows:
                continue
            if resume and store(start).load_newest(engine) is None:
                raise AnabranchError(f"there is no checkpoint after step {start}")
            seen: dict[str, Any] = {str(engine.step): {"weights": _digest(engine)}}
            while engine.step < steps:
                output = engine.train_step(batch(engine.step))
                seen[str(engine.step)] = {"loss": output.loss, "weights": _digest(engine)}
                if not resume and engine.step in at:
                    store(engine.step).save(engine, {})
            found[str(start)] = seen
    return found if resume else found.get("0", {})


def _work(job: dict[str, Any]) -> None:
    folder, found = Path(job["folder"]), {}
    for run in job["runs"]:
        config, stage = load_config(run["config"]), str(run["stage"])
        place = folder / f"stage-{stage}"
        found[stage] = _run(config, run["at"], job["steps"], place, resume=job["resume"])
    if (rank_from_environment() or (0, 1))[0] == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _work(json.loads(Path(sys.argv[1]).read_text()))
    leave_ranks(0)
