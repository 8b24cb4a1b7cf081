"""The program that converts a DeepSpeed checkpoint: `python -m anabranch.learner.universal_files SOURCE TARGET`.

Invariant: what it writes loads at every ZeRO stage from 1 to 3, whichever stage wrote SOURCE, with Adam's step count:
DeepSpeed 0.19.8 writes the common state and parameters in one form for stages 1 and 2 and in another for
stage 3, and its stages 1 and 2 take a missing step count for 0 without a word. It is run by `universal.make_universal`, with torch forced to read data only.
Held by tests/unit/learner/test_universal.py and tests/e2e/test_world_size.py.

Written for deepspeed 0.19.8; can go when `ds_to_universal` writes one form for all stages.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anabranch.learner.deepspeed_files import deepspeed_classes

STATE = "optimizer_state_dict"  # DeepSpeed's key of stage 3
PARAMETER = "param"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # of stages 1 and 2, and of 3
_PARTS = (("base_optimizer_state", "single_partition_of_fp32_groups"), (STATE, "fp32_flat_groups"))  # stages 1 and 2; 3
_GLOBAL = ("loss_scaler", "dynamic_loss_scale", "overflow", "ds_version", "zero_stage", "param_groups")


def convert(source: Path, target: Path) -> None:
    """Write the universal form of the DeepSpeed folder `source` to `target`, which must not exist."""
    from deepspeed.checkpoint import ds_to_universal

    with _begun_states():
        ds_to_universal.main(
            Namespace(
                input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
                keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip
    step = _complete_state(target / "zero" / "optimizer_state.pt", source)
    for moment in (target / "zero").rglob("exp_avg.pt"):  # a second name of a tied weight has none
        _complete_parameter(moment.parent, step)
    _one_model_file(target)


@contextlib.contextmanager
def _begun_states() -> Iterator[None]:
    """Inside, `torch.load` gives an optimizer that has made no step yet (a checkpoint of step 0, or gates skipped all before) the state
    that its first step would begin with; it has none, and ds_to_universal cannot do without."""
    load = torch.load

    def begun(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        found = loaded.get(STATE) if isinstance(loaded, dict) else None
        for inner, masters in _PARTS if found else ():
            if inner in found and masters in found:
                states = found[inner]["state"]
                for number, flat in enumerate(found[masters]):
                    if "exp_avg" not in states.get(number, {}):
                        states[number] = {
                            "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat),
                        }  # fmt: skip
        return loaded

    torch.load = begun
    try:
        yield
    finally:
        torch.load = load


def _complete_parameter(folder: Path, step: Any) -> None:
    if not (folder / "step.pt").exists():
        torch.save(step, folder / "step.pt")
    for file in (folder / f"{key}.pt" for key in ("fp32", "exp_avg", "exp_avg_sq")):
        if torch.is_tensor(values := torch.load(file)):  # stages 1 and 2 want it with a name
            torch.save({PARAMETER: values}, file)


def _complete_state(file: Path, source: Path) -> Any:
    """Bring the common state into the form that all stages read, without the tensors of one rank; returns Adam's step."""
    state = torch.load(file, map_location="cpu")
    stage_3 = state.get(STATE)
    step = stage_3["state"][0]["step"] if stage_3 else next(iter(_any_step(file.parent)))
    kept = {key: state[key] for key in _GLOBAL if key in state}
    if "ds_version" not in kept:
        any_model = next(source.glob("*_model_states.pt"))
        kept["ds_version"] = torch.load(any_model, map_location="cpu")["ds_version"]
    kept[STATE] = {"state": {0: {"step": step}}, "param_groups": kept["param_groups"]}
    torch.save(kept, file)
    return step


def _any_step(zero: Path) -> list[Any]:
    return [torch.load(next(zero.rglob("step.pt")))]


def _one_model_file(target: Path) -> None:
    """The weights are in `zero`; what else a model file says is the same for every rank."""
    there = sorted(p for p in target.glob("*_model_states.pt") if re.search(r"mp_rank_\d+_model_states", p.name))
    model = torch.load(there[0], map_location="cpu")
    for file in there:
        file.unlink()
    model["module"] = {}
    torch.save(model, target / MODEL_FILES[0])
    os.link(target / MODEL_FILES[0], target / MODEL_FILES[1])


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    with deepspeed_classes():
        convert(source, target)


if __name__ == "__main__":
    main()
