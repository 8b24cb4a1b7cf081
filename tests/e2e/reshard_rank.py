"""One rank of a tiny learner for test_world_size.py: `python reshard_rank.py JOB.json`. A job lists runs, done one after the
other by the same ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' own helpers: python -I leaves the folder out
from tests.unit.learner.conftest import make_batch


def main(job_file: str) -> None:
    from anabranch.learner.distribute import leave_ranks

    for run in json.loads(Path(job_file).read_text()):
        train(**run)
    leave_ranks(0)


def train(model: str, out: str, learner: dict[str, Any], checkpoints: str, steps: int, refused: bool = False) -> None:
    """Load what is in the folder `checkpoints`, if anything, do `steps` steps and save; then one step more. Leaves in `out`:
    the state after loading, after the steps, and the figures."""
    from anabranch.learner.checkpoint import CheckpointStore
    from anabranch.learner.distribute import rank_from_environment
    from anabranch.learner.engine import LearnerEngine
    from anabranch.schemas.config import CorrectionSection, LearnerSection
    from anabranch.schemas.errors import CheckpointError

    rank, world_size = rank_from_environment() or (0, 1)
    section = LearnerSection(**({"lr": 1e-3, "micro_batch_tokens": 64} | learner), world_size=world_size)
    correction = CorrectionSection(veto_low=0.0, veto_high=1e9)
    engine = LearnerEngine(
        Path(model), section, correction, run_seed=0, temperature=1.0, rank=rank, world_size=world_size
    )
    folder, report = Path(out), dict[str, Any]()
    folder.mkdir(exist_ok=True)
    # Every rank has a store: all methods of the engine are collective here.
    store = CheckpointStore(Path(checkpoints), run="r", layout_hash=engine.layout.hash, keep=1)
    if Path(checkpoints).exists():
        place = max(p for p in Path(checkpoints).iterdir() if p.name.startswith("step-"))
        try:
            report["resumed"] = engine.load(place)
        except CheckpointError as error:
            if world_size > 1:
                raise  # the others wait for this rank
            report["error"] = str(error)
    if "error" not in report:
        if "resumed" in report:
            save(folder / "loaded.npz", engine, rank)
        losses = [engine.train_step(batch(engine.step)).loss for _ in range(steps)]
        if steps:
            save(folder / "saved.npz", engine, rank)
            unfinished = Path(checkpoints) / f"step-{engine.step:08d}"
            if rank:
                engine.save(unfinished.with_name(f".{unfinished.name}.tmp"), {"at": engine.step})
            else:
                store.save(engine, {"at": engine.step})
        output = engine.train_step(batch(engine.step))
        report |= {"step": engine.step, "losses": losses, "loss": output.loss, "grad_norm": output.grad_norm}
        save(folder / "after.npz", engine, rank)
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))


def batch(step: int) -> Any:
    return make_batch([3 * step, 3 * step + 1, 3 * step + 2])


def save(file: Path, engine: Any, rank: int) -> None:
    """Weights as published, float32 masters, moments and Adam's step, all whole."""
    from anabranch.learner.quiet import without_deprecations

    with without_deprecations():
        found = whole(engine)
    if rank == 0:
        np.savez(file, **found)


def whole(engine: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"bits {name}": bits for name, bits in engine.state_bits().items()}
    optimizer, plain = engine._engine.optimizer, engine._learner.zero_stage == 0
    for name, parameter in engine._engine.module.named_parameters():
        if plain:
            found[f"fp32 {name}"] = parameter.detach().numpy().copy()
        else:
            found[f"fp32 {name}"] = safe_get_full_fp32_param(parameter).numpy().copy()
        for key in ("exp_avg", "exp_avg_sq"):
            if plain:
                moment = optimizer.state[parameter].get(key, torch.zeros(parameter.shape))
            else:
                moment = safe_get_full_optimizer_state(parameter, key)
            found[f"{key} {name}"] = moment.numpy().copy().reshape(-1)
    inner = getattr(optimizer, "optimizer", optimizer)
    found["adam steps"] = np.unique([float(s["step"]) for s in inner.state.values() if "step" in s])
    return found


if __name__ == "__main__":
    main(sys.argv[1])
