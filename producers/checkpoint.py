"""The checkpoint folder that an engine is started from: its tensors, and how it differs from other weights.

Invariant: what is wrong with the folder is a `ModelMismatchError`, which ends a producer for good; the tensors are those
of transport/checkpoint_files.py, tied ones once. Held by tests/unit/producers/test_mirror.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabranch.schemas.errors import ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.transport import checkpoint_files
from anabranch.transport.checkpoint_files import StoredTensor


def checkpoint_tensors(model_dir: Path) -> list[StoredTensor]:
    """All tensors of the checkpoint in `model_dir`, sorted by name.

    Raises:
        ModelMismatchError: no safetensors there, a damaged file, a shard that lacks a tensor, tied tensors that differ.
    """
    if not model_dir.is_dir():
        raise ModelMismatchError(f"{model_dir} is not a safetensors checkpoint: there is no such folder")
    found = checkpoint_files.scan_checkpoint(model_dir, refuse=ModelMismatchError)
    return [found.places[spec.name][0] for spec in found.layout.tensors]


def first_difference(ours: Layout, theirs: Layout) -> str:
    """Where the layout of the weights (`theirs`) departs from the model's (`ours`), in words."""
    found = checkpoint_files.first_difference(ours, theirs, here="the model", there="the weights")
    return found or "the layouts differ"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} if there is no such file. Raises ModelMismatchError if it is damaged."""
    return checkpoint_files.read_object(path, refuse=ModelMismatchError)
