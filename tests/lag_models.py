"""A random tiny model, a configuration around it and prompts whose answers vary, for tests of the lag study."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from anabranch.deploy.demo_options import DemoOptions, resolve
from anabranch.learner.tiny_model import TinyShape, build_model, save_checkpoint
from anabranch.producers.environments import Problem
from anabranch.schemas.config import RunConfig

SHAPE = TinyShape(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)  # fmt: skip


def make_model(folder: Path) -> Path:
    """Wide enough for policies to differ after one step."""
    model = build_model(SHAPE, 0)
    model.get_output_embeddings().weight.data.mul_(10)
    save_checkpoint(model, folder)
    return folder


def make_config(model: Path, *overrides: str, seed: int = 0, steps: int = 2) -> RunConfig:
    own = [f"model.path={json.dumps(str(model))}", f"run.seed={seed}", f"learner.steps={steps}"]
    small = [
        "learner.groups_per_step=3",
        "learner.lr=3e-3",
        "learner.warmup_steps=0",
        "sampling.group_size=4",
        "task.heldout_size=5",
    ]
    return resolve(DemoOptions(preset="tiny"), [*own, *small, *overrides])


class OddPrompts:
    """Prompts of different lengths; a random model's answers are right about half the time."""

    def training(self, group_index: int) -> tuple[Problem, Sequence[int]]:
        ids = [65 + (group_index + n) % 26 for n in range(3 + group_index % 3)]
        return Problem(str(group_index), bytes(ids).decode(), "", {}), ids

    def heldout(self, index: int) -> tuple[Problem, Sequence[int]]:
        return self.training(1000 + index)

    def score(self, problem: Problem, text: str) -> float:
        return float(sum(text.encode()) % 2)
