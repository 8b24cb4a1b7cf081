"""What a loaded engine takes from a checkpoint, and what from its own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anabranch.learner.engine_files import Identity, load_engine
from tests.unit.learner.conftest import make_batch


@pytest.mark.parametrize("stage", [0, 1])
def test_hyperparameters_are_those_of_the_configuration(engine, tmp_path: Path, stage: int):
    """DeepSpeed and torch restore those that the checkpoint was made with, so a change in the file would do nothing."""
    first = engine(zero_stage=stage, betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0)
    first.train_step(make_batch([0, 1]))
    first.save(tmp_path / "c", {})
    second = engine(zero_stage=stage, betas=(0.8, 0.9), weight_decay=0.5, grad_clip=0.25)
    second.load(tmp_path / "c")
    (group,) = second._engine.optimizer.param_groups
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.8, 0.9), 0.5)
    if stage:
        assert second._engine.optimizer.clip_grad == 0.25
    (state,) = {float(s["step"]) for s in second._engine.optimizer.state.values() if "step" in s}
    assert state == 1, "its moments are the checkpoint's"


def test_a_rank_that_the_checkpoint_knows_nothing_of_goes_on_with_the_random_state_of_rank_0(engine, tmp_path: Path):
    learner = engine()
    torch.manual_seed(5)
    learner.save(tmp_path / "c", {"at": 0})
    expected = torch.rand(3)
    identity = Identity(1, 1, "bfloat16", "float32")
    for rank in (0, 1):
        torch.manual_seed(6)
        assert load_engine(learner._engine, tmp_path / "c", rank=rank, identity=identity) == (0, {"at": 0})
        assert torch.equal(torch.rand(3), expected)
