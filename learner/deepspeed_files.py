"""DeepSpeed's checkpoint files, read as data, and what it means when one cannot be written.

Invariant: loading a checkpoint runs no code from it. DeepSpeed writes with `torch.save` and reads with the full
unpickler; here reading is restricted to tensors, plain containers and the three DeepSpeed classes that its optimizer
state contains. A file that cannot be written (torch's writer tells a full disk as a RuntimeError about its archive) is a
TemporaryError that names it. Held by tests/unit/learner/test_checkpoint.py.

Written for deepspeed 0.19.8 (all devices). Can go when DeepSpeed reads with `weights_only=True`; a class that another
version adds makes the load fail by name.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anabranch.schemas.errors import CheckpointError, TemporaryError


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Inside, `torch.load(weights_only=True)` takes the classes of DeepSpeed that its files hold: data, without code of their
    own to run when they are read. May be nested."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    allowed = torch.serialization.get_safe_globals()
    # Only what is not allowed yet: torch's own context takes away at its end what one around it had allowed.
    with torch.serialization.safe_globals(
        [c for c in (LossScaler, ZeroStageEnum, fragment_address) if c not in allowed]
    ):
        yield


def guard_files(engine: Any) -> None:
    """Make `engine` (a DeepSpeedEngine) read checkpoints without running code from them, and fail to write with a
    TemporaryError."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        raise CheckpointError(
            f"learner.deepspeed selects {type(engine.checkpoint_engine).__name__}; only DeepSpeed's default is supported"
        )

    def load(path: str, map_location: Any = None) -> Any:
        try:
            with deepspeed_classes():
                return torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{Path(path).name} is not a DeepSpeed checkpoint file: {error}") from error

    def save(state_dict: Any, path: str) -> None:
        try:
            torch.save(state_dict, path)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(Path(path).parent).free
            raise TemporaryError(
                f"{path} cannot be written ({str(error).splitlines()[0]}; {free:,} bytes are free): make room, then start the "
                "learner again; it goes on from the checkpoint before"
            ) from error

    engine.checkpoint_engine.load, engine.checkpoint_engine.save = load, save
