"""One, two and three ranks train the same, whatever the ZeRO stage, the layout of rows, the microbatches and the objective:
what is split is work, not arithmetic. And a rank above 0 is sent its share and nothing else.

Every pair of two settings is together in some run (`RUNS`); all runs of a world share its processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.learner.batch import TrainBatch
from anabranch.learner.launch import launch_ranks
from tests.e2e import split_rank
from tests.unit.learner.conftest import make_batch, save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("split_rank.py")
# A large eps keeps Adam from turning the rounding of a gradient near 0 into a whole step.
COMMON = {"dtype": "float32", "lr": 1e-2, "eps": 1e-3}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dppo_tv": {"learner": {}, "correction": {"tau": 0.01}},
    "m2po": {"learner": {}, "correction": {"objective": "m2po"}},
    "gspo": {"learner": {}, "correction": {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.3}},
    "decoupled": {"learner": {"updates_per_step": 2}, "correction": {"objective": "decoupled"}},
}
PLAIN = {"packing": False}
PACKED = {"packing": True, "share_prompts": False}
SHARED = {"packing": True, "share_prompts": True}
# objective -> layout and budget at stages 0, 1, 2, 3
TABLE = {
    "dppo_tv": [(PLAIN, 40), (PACKED, 4096), (SHARED, 40), (SHARED, 4096)],
    "m2po": [(SHARED, 4096), (SHARED, 40), (PLAIN, 4096), (PACKED, 40)],
    "gspo": [(PACKED, 40), (SHARED, 4096), (SHARED, 40), (PLAIN, 4096)],
    "decoupled": [(SHARED, 4096), (PLAIN, 40), (PACKED, 4096), (SHARED, 40)],
}
RUNS = {
    f"{objective} {stage}": {
        "learner": COMMON
        | OBJECTIVES[objective]["learner"]
        | layout
        | {"zero_stage": stage, "micro_batch_tokens": budget},
        "correction": OBJECTIVES[objective]["correction"],
    }
    for objective, table in TABLE.items()
    for stage, (layout, budget) in enumerate(table)
}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
for stage, offload in ((1, OFFLOADED), (2, OFFLOADED), (3, OFFLOADED | {"offload_param": {"device": "cpu"}})):
    RUNS[f"dppo_tv {stage} offloaded"] = {
        "learner": COMMON
        | {"zero_stage": stage, "micro_batch_tokens": 40, "deepspeed": {"zero_optimization": offload}},
        "correction": OBJECTIVES["dppo_tv"]["correction"],
    }
STEPS = 3
# Two ranks on half of the table: the other half would tell nothing new (test_learner_engine.py has two ranks as well).
HERE = {3: list(RUNS), 2: [name for name in RUNS if name.startswith(("m2po", "decoupled"))]}
BOTH = [(run, world_size) for world_size, names in HERE.items() for run in names]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`first`: 8 groups; `few`: one group of two rollouts with a gradient, fewer than three ranks could share; `last`;
    `broken`: as `first`, with one log-prob that is no number, which only one rank is sent."""
    made = {"first": make_batch(range(8)), "few": make_batch([9], samples=2), "last": make_batch(range(10, 14))}
    made["broken"] = make_batch(range(8))
    made["broken"].behaviour[-1, 0] = np.nan
    folder = tmp_path_factory.mktemp("batches")
    for name, batch in made.items():
        (folder / f"{name}.npz").write_bytes(batch.to_bytes())
    return {name: str(folder / f"{name}.npz") for name in made}


@pytest.fixture(scope="module")
def runs(batches: dict[str, str]) -> dict[str, dict[str, Any]]:
    straight = [batches["first"], batches["few"], batches["last"]]
    gated = [batches["first"], batches["broken"], batches["last"]]
    skipping = {
        f"skipping {stage}": {
            "learner": COMMON | {"zero_stage": stage}, "batches": gated, "gates": {"non_finite_action": "skip"},
        }
        for stage in range(4)
    }  # fmt: skip
    return {name: run | {"batches": straight} for name, run in RUNS.items()} | skipping


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, runs: dict[str, Any]) -> dict[int, Path]:
    """World size -> folder with what `split_rank.main` writes."""
    folders = {}
    for world_size in (2, 3):
        folders[world_size] = out = tmp_path_factory.mktemp(f"{world_size} ranks")
        job = out / "job.json"
        chosen = {name: run for name, run in runs.items() if name in HERE[world_size] or name not in RUNS}
        job.write_text(json.dumps({"model": str(model_dir), "out": str(out), "runs": chosen}))
        assert launch_ranks(world_size, [sys.executable, "-I", str(PROGRAM), str(job)], grace_s=5) == 0
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, batches: dict[str, str], runs: dict[str, Any]):
    """Figures and weights of one rank with padded rows, stage 1, and no limit on a microbatch: by objective, and "skipping"
    for the gated run without the broken batch."""
    out = tmp_path_factory.mktemp("alone")
    reference = PLAIN | {"zero_stage": 1, "micro_batch_tokens": 100_000}
    made = {}
    for name in OBJECTIVES:
        run = runs[f"{name} 0"]
        run = run | {"learner": run["learner"] | reference}
        made[name] = split_rank.train(model_dir, out / f"{name}.npz", **run), values(out / f"{name}.npz")
    run = {"learner": COMMON | reference, "batches": [batches["first"], batches["last"]]}
    made["skipping"] = split_rank.train(model_dir, out / "skipping.npz", **run), values(out / "skipping.npz")
    return made


def values(file: Path) -> np.ndarray:
    with np.load(file) as bits:
        return np.concatenate([bits[name].view(np.float32).astype(np.float64) for name in sorted(bits.files)])


def report(folder: Path, run: str) -> list[dict[str, Any]]:
    return json.loads((folder / "report.json").read_text())[run]


@pytest.mark.parametrize(("run", "world_size"), BOTH)
def test_a_step_does_not_depend_on_how_it_is_split(worlds, alone, run: str, world_size: int):
    figures, weights = alone[run.split()[0]]
    for got, expected in zip(report(worlds[world_size], run), figures, strict=True):
        # A loss is a sum of either sign: where it all but cancels, rounding is that of its terms.
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert got["masked"] == pytest.approx(expected["masked"], abs=1e-12), "the same tokens, to the last"
    np.testing.assert_allclose(values(worlds[world_size] / f"{run}.npz"), weights, rtol=0, atol=1e-5)


def test_the_objectives_are_at_work(alone):
    """Otherwise one would be tested under several names."""
    assert len({figures[0]["grad_norm"] for name, (figures, _) in alone.items() if name != "skipping"}) == 4
    for name in ("dppo_tv", "m2po", "gspo"):
        assert 0 < alone[name][0][0]["masked"] < 1


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_what_one_rank_finds_wrong_all_ranks_skip(worlds, alone, stage: int, world_size: int):
    """One rank alone has the log-prob that is no number."""
    first, broken, last = report(worlds[world_size], f"skipping {stage}")
    assert (first["skipped"], broken["skipped"], last["skipped"]) == ([], list(range(8)), [])
    figures, weights = alone["skipping"]
    for got, expected in zip((first, last), figures, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(values(worlds[world_size] / f"skipping {stage}.npz"), weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("run", "world_size"), BOTH)
def test_a_rank_is_sent_its_share_and_nothing_else(worlds, batches, run: str, world_size: int):
    sent = [json.loads((worlds[world_size] / f"{run}.sent-{r}.json").read_text()) for r in range(1, world_size)]
    assert {len(each) for each in sent} == {2 * STEPS}
    for step, name in enumerate(("first", "few", "last")):
        batch = TrainBatch.from_bytes(Path(batches[name]).read_bytes())
        total, held = len(batch.lengths), []
        for each in sent:
            announced, share = each[2 * step], each[2 * step + 1]
            assert announced == {"announced": 1}, "what all ranks hear is that there is a step, and no row of it"
            assert all(count == 1 for count in share["targets of passes without rollouts"])
            held += share["rows"]
        assert len(held) == len(set(held)), "nobody gets what is another's"
        if name == "few":
            assert len(held) <= total
        else:
            assert 0 < len(held) < total, "and some are rank 0's own"


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_sent_shrinks_with_the_number_of_ranks(worlds, world_size: int):
    """With prompts shared and no limit on a microbatch, a rank works on about its part of the positions."""
    batch = make_batch(range(8))
    positions = int((batch.lengths - 1).sum()) + sum(int(batch.prompt_lengths[batch.group == g][0]) for g in range(8))
    share = json.loads((worlds[world_size] / "m2po 0.sent-1.json").read_text())[1]
    assert share["positions"] < 1.35 * positions / world_size
