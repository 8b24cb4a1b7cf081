"""What an engine writes into a checkpoint, and how another goes on from it.

Invariant: an engine of the same kind that loads what `save_engine` wrote continues bit for bit. One with another number of
ranks, or another ZeRO stage above 0, gets the same bits of weights and moments by way of DeepSpeed's universal checkpoint;
what cannot be carried over is refused by name before anything is read. Hyperparameters are those of the engine's own
configuration, not of the checkpoint. Held by tests/unit/learner/test_checkpoint.py, tests/e2e/test_resume.py and
tests/e2e/test_world_size.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from anabranch.learner import random_state
from anabranch.learner.quiet import quiet
from anabranch.learner.universal import (
    DEEPSPEED_FOLDER,
    as_universal,
    await_universal,
    make_universal,
    universal_folder,
)
from anabranch.schemas.errors import CheckpointError
from anabranch.transport.files import read_json

ENGINE_FILE, CLIENT_FILE = "engine.json", "client.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint should share with the engine that loads it."""

    world_size: int
    zero_stage: int
    dtype: str
    compute_dtype: str


def save_engine(
    engine: Any, directory: Path, client_state: dict[str, Any], *, rank: int, step: int, identity: Identity
) -> None:
    """Write everything that a bit-equal continuation of `engine` (a DeepSpeedEngine) needs to `directory`. Collective.

    Raises TemporaryError or OSError: the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with quiet():
        engine.save_checkpoint(str(directory), tag=DEEPSPEED_FOLDER, save_latest=False)
    (directory / _random_file(rank)).write_text(json.dumps(random_state.capture()))
    if rank == 0:
        for script in directory.glob("*.py"):
            script.unlink()  # DeepSpeed adds conversion scripts; ours is `CheckpointStore.export`
        (directory / ENGINE_FILE).write_text(json.dumps({"step": step} | asdict(identity)))
        (directory / CLIENT_FILE).write_text(json.dumps(client_state))
    torch.distributed.barrier()


def load_engine(
    engine: Any, directory: Path, *, rank: int, identity: Identity, heartbeat: Callable[[], object] = lambda: None
) -> tuple[int, dict[str, Any]]:
    """Restore what `save_engine` wrote into a new engine; returns (step, client state). Collective.

    Random generators: a rank goes on with the state of the rank of its number; one that the checkpoint has none for, with
    that of rank 0 (all ranks begin a run with the same).

    Raises:
        CheckpointError: written with dtypes, or a stage, from which this engine cannot go on; or a file cannot be read.
    """
    saved = read_json(directory / ENGINE_FILE, refuse=CheckpointError)
    converted = _must_be_converted(directory, saved, identity, engine)
    hyperparameters = _Hyperparameters(engine.optimizer)
    if converted:
        if rank == 0:
            make_universal(directory, heartbeat=heartbeat)
        else:
            await_universal(directory)
        torch.distributed.barrier()
        with as_universal(engine), quiet():
            path, _ = engine.load_checkpoint(str(universal_folder(directory)), tag=DEEPSPEED_FOLDER)
    else:
        with quiet():
            path, _ = engine.load_checkpoint(str(directory), tag=DEEPSPEED_FOLDER)
    if path is None:
        raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint")
    hyperparameters.restore()
    own = directory / _random_file(rank)
    random_state.restore(read_json(own if own.exists() else directory / _random_file(0), refuse=CheckpointError))
    client_state: dict[str, Any] = read_json(directory / CLIENT_FILE, refuse=CheckpointError)
    return int(saved["step"]), client_state


class _Hyperparameters:
    """Those that an optimizer was made with: DeepSpeed and torch would take over the checkpoint's without a word."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._clip = getattr(optimizer, "clip_grad", None)

    def restore(self) -> None:
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        if self._clip is not None:
            self._optimizer.clip_grad = self._clip


def _must_be_converted(directory: Path, saved: dict[str, Any], ours: Identity, engine: Any) -> bool:
    def refuse(key: str, why: str = "") -> CheckpointError:
        return CheckpointError(
            f"{directory} was written with {key} = {saved.get(key)}; this learner has {getattr(ours, key)}{why}"
        )

    for key in ("dtype", "compute_dtype"):
        if saved.get(key) != getattr(ours, key):
            raise refuse(key)
    changed = [key for key in ("zero_stage", "world_size") if saved.get(key) != getattr(ours, key)]
    stages = {saved.get("zero_stage"), ours.zero_stage}
    if not changed or stages == {0}:  # at stage 0 every rank holds, and rank 0 saves, everything
        return False
    if 0 in stages:
        raise refuse("zero_stage", ": stage 0 and the others keep their optimizer state in different ways")
    if engine.zero_nvme_offload_optimizer():
        raise refuse(changed[0], ", and its optimizer state is offloaded to NVMe, which cannot be split anew")
    return True


def _random_file(rank: int) -> str:
    return f"rng-{rank}.json"
