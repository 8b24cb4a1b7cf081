"""The smallest thing that can be checkpointed, and stores of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabranch.learner.checkpoint import CheckpointStore
from anabranch.learner.weights import tensor_bits
from anabranch.schemas.layout import Layout


class Counter:
    """Its state is its step."""

    layout = Layout.build([("w", "f32", (2,))])

    def __init__(self, step: int = 0, model_dir: Path = Path()) -> None:
        self.step, self.model_dir = step, model_dir

    def save(self, directory: Path, client_state: dict[str, Any]) -> None:
        (directory / "deep").mkdir(parents=True)
        (directory / "deep" / "state.pt").write_text(str(self.step))
        (directory / "client.json").write_text(json.dumps(client_state))

    def load(self, directory: Path) -> dict[str, Any]:
        self.step = int((directory / "deep" / "state.pt").read_text())
        found: dict[str, Any] = json.loads((directory / "client.json").read_text())
        return found

    def state_bits(self) -> dict[str, np.ndarray]:
        return {"w": tensor_bits(torch.full((2,), float(self.step)))}


def store(
    directory: Path, *, run: str = "run", layout_hash: str = Counter.layout.hash, keep: int = 2, keep_every: int = 0
) -> CheckpointStore:
    return CheckpointStore(
        directory / "check points", run=run, layout_hash=layout_hash, keep=keep, keep_every=keep_every
    )
