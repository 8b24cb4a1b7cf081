"""DeepSpeed's checkpoint files, read as data.

Invariant: loading a checkpoint runs no code from it. DeepSpeed writes with `torch.save` and reads with the full
unpickler; here reading is restricted to tensors, plain containers and the three DeepSpeed classes that its optimizer
state contains. Held by tests/unit/learner/test_checkpoint.py.

Written for deepspeed 0.19.8 (all devices). Can go when DeepSpeed reads with `weights_only=True`; a class that another
version adds makes the load fail by name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from anabranch.schemas.errors import CheckpointError


def read_as_data(engine: Any) -> None:
    """Make `engine` (a DeepSpeedEngine) read checkpoints without running code from them."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        raise CheckpointError(
            f"learner.deepspeed selects {type(engine.checkpoint_engine).__name__}; only DeepSpeed's default is supported"
        )

    def load(path: str, map_location: Any = None) -> Any:
        try:
            with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
                return torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{Path(path).name} is not a DeepSpeed checkpoint file: {error}") from error

    engine.checkpoint_engine.load = load
