"""A checkpoint of one number of ranks and stage, loaded by another: the same bits of weights, masters and moments, and Adam
counts on; the next step's loss is the same to rounding."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.learner.launch import launch_ranks
from tests.e2e import reshard_rank
from tests.unit.learner.conftest import save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
RANK = Path(reshard_rank.__file__)

# bf16 weights: masters rounded for each forward pass (computed in float32), or DeepSpeed's own bf16 mode.
KINDS: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2 bf16": {"zero_stage": 2, "compute_dtype": "bfloat16"},
    "3 bf16": {"zero_stage": 3},
}
OTHERS: dict[str, dict[str, Any]] = {"2": {"zero_stage": 2}, "1 bf16": {"zero_stage": 1, "compute_dtype": "bfloat16"}}
CHANGES = {
    (1, 2): ["0", "1", "3 bf16"],
    (2, 1): ["0", "1", "2 bf16", "3 bf16"],
    (2, 3): ["1", "2 bf16", "3 bf16"],
}
OTHER_STAGE = [("1", "2"), ("2 bf16", "3 bf16"), ("3 bf16", "1 bf16"), ("3 bf16", "2 bf16")]
REFUSED = [("0", "1"), ("2 bf16", "0"), ("1", "3 bf16")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RANKS KIND` for what `RANKS` wrote, `FROM KIND to RANKS KIND` for what others made of it."""
    root = tmp_path_factory.mktemp("world size")
    model = str(save_qwen3(root / "model"))

    def run(out: str, kind: str, checkpoints: str, steps: int) -> dict[str, Any]:
        return {
            "model": model,
            "out": str(root / out),
            "learner": (KINDS | OTHERS)[kind],
            "checkpoints": str(root / checkpoints),
            "steps": steps,
        }

    def write(ranks: int, kinds: list[str]) -> list[dict[str, Any]]:
        return [run(f"{ranks} {kind}", kind, f"checkpoints {ranks} {kind}", 2) for kind in kinds]

    def load(was: int, now: int, others: list[tuple[str, str]] | None = None) -> list[dict[str, Any]]:
        kinds = [(kind, kind) for kind in CHANGES[was, now]] + (others or [])
        return [run(f"{was} {a} to {now} {b}", b, f"checkpoints {was} {a}", 0) for a, b in kinds]

    def launch(ranks: int, runs: list[dict[str, Any]]) -> None:
        job = root / "job.json"
        job.write_text(json.dumps(runs))
        assert launch_ranks(ranks, [sys.executable, "-I", str(RANK), str(job)], grace_s=5) == 0

    for each in write(1, CHANGES[1, 2]):
        reshard_rank.train(**each)
    launch(2, write(2, list(KINDS)) + load(1, 2))
    for each in load(2, 1, OTHER_STAGE + REFUSED):
        reshard_rank.train(**each)
    launch(3, load(2, 3))
    return root


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def state(file: Path) -> dict[str, np.ndarray]:
    """Names as the policy has them: `MasterWeights` puts its own before."""
    with np.load(file) as found:
        return {name: found[name].reshape(-1) for name in found}


@pytest.mark.parametrize(
    ("was", "now", "kind", "to"),
    [(was, now, kind, kind) for (was, now), kinds in CHANGES.items() for kind in kinds]
    + [(2, 1, kind, to) for kind, to in OTHER_STAGE],
)
def test_another_number_of_ranks_or_stage_goes_on_from_the_same_bits(world: Path, was, now, kind, to):
    before, after = world / f"{was} {kind}", world / f"{was} {kind} to {now} {to}"
    saved, loaded = state(before / "saved.npz"), state(after / "loaded.npz")
    assert saved.keys() == loaded.keys()
    assert any(name.startswith("exp_avg_sq") for name in saved)
    for name, values in saved.items():
        assert values.tobytes() == loaded[name].tobytes(), name
    assert loaded["adam steps"] == [2]
    assert report(after)["resumed"] == {"at": 2}
    assert report(after)["step"] == report(before)["step"] == 3
    in_bf16 = "bf16" in kind  # another number of ranks packs other rows, and in bf16 a sum of other parts is another
    assert report(after)["loss"] == pytest.approx(report(before)["loss"], abs=4e-3 if in_bf16 else 1e-4)
    if not in_bf16:
        straight, resumed = state(before / "after.npz"), state(after / "after.npz")
        for name in (n for n in straight if n.startswith("fp32")):
            np.testing.assert_allclose(resumed[name], straight[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "to"), REFUSED)
def test_what_cannot_be_carried_over_is_refused_by_name(world: Path, kind, to):
    error = report(world / f"2 {kind} to 1 {to}")["error"]
    named = "compute_dtype" if ("bf16" in kind) != ("bf16" in to) else "zero_stage"
    assert f"was written with {named} = " in error, error


def test_it_is_converted_once_and_leaves_no_files_behind(world: Path):
    """By several ranks, and by several learners one after the other."""
    for ranks, kinds in ((1, CHANGES[1, 2]), (2, KINDS)):
        for kind in kinds:
            names = sorted(os.listdir(world / f"checkpoints {ranks} {kind}"))
            assert names == (["step-00000002"] if kind == "0" else ["step-00000002", "universal-step-00000002"])
