"""Recorded steps of real engines, run again by the command: bit-equal, or what differs is located."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.consumers.recorded_files import recorded_files
from anabranch.consumers.step_records import read_facts, recorded_steps
from anabranch.learner.batch import build_batch
from anabranch.learner.launch import launch_ranks
from anabranch.schemas.step_record import FACTS_FILE
from anabranch.schemas.trajectory import Group
from anabranch.schemas.version_record import VERSIONS_FILE
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.e2e.test_learner_engine import command, results
from tests.recorded_groups import record_groups
from tests.unit.learner.conftest import make_group, save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
STEPS = [[0, 1, 2], [5], [7, 8], [9, 10]]
SAMPLED_BY = PolicyVersion(1, 0)


def spooled(index: int) -> Group:
    group = make_group(index)
    rollouts = tuple(replace(r, spans=(VersionSpan(SAMPLED_BY, 0),)) for r in group.rollouts)
    return replace(group, producer="spool", rollouts=rollouts)


def replay(run: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "anabranch.cli.main", "replay", "step", *args, "--run", str(run)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run of four steps by one or two ranks, with a checkpoint after the second."""
    root = tmp_path_factory.mktemp("runs")
    model = save_qwen3(root / "model")
    files = []
    for number, indices in enumerate(STEPS):
        files.append(root / f"{number}.npz")
        batch = build_batch(list(map(spooled, indices)), now=PolicyVersion(1, number), forks={1: 0}, max_age=8)
        files[-1].write_bytes(batch.to_bytes())

    def make(ranks: int) -> Path:
        out = root / f"ranks-{ranks}"
        if not out.exists():
            learner = {"zero_stage": ranks, "lr": 1e-3, "micro_batch_tokens": 48}
            run = {
                "out": str(out),
                "run": out.name,
                "learner": learner,
                "batches": list(map(str, files)),
                "save_at": 2,
                "record": True,
            }
            assert launch_ranks(ranks, command(root / "job.json", model=str(model), runs=[run]), grace_s=5) == 0
            record_groups(out, [spooled(index) for indices in STEPS for index in indices])
            digests = results(out)[0]["digests"]
            lines = [
                {"time_ms": 1, "epoch": 1, "version": v, "kind": "anchor", "label": "anchor", "payload_bytes": 1, "full_bytes": 1,
                 "changed_fraction": 1.0, "result_digest": digest} for v, digest in enumerate(digests)
            ]  # fmt: skip
            (out / VERSIONS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
            (out / "resolved.toml").write_text(f'[model]\npath = "{model}"\n')
        return out

    return make


def snapshot(run: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_runs_again_to_the_bit_and_the_run_is_only_read(made, ranks: int):
    run = made(ranks)
    before = snapshot(run)
    done = replay(run, "4", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(s["step"], s["equal"], s["from_step"]) for s in steps] == [(3, True, 2), (4, True, 2)]
    assert all(s["weights_digest"] == s["weights_digest_then"] is not None for s in steps)
    assert steps[0]["not_as_it_was"] == []
    assert snapshot(run) == before


def test_all_steps_from_the_model_that_the_run_began_with(made):
    done = replay(made(1), "--random", "9", "--from-checkpoint", "0")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "4 steps run again: bit-equal" in done.stdout
    assert "step 4 of 4" in done.stderr, "progress is told"


def change_rows(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    (file,) = recorded_files(run / "trajectories")
    table = pq.read_table(file.path, partitioning=None)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), file.path)


def test_a_reward_that_was_changed_is_located(made, tmp_path: Path):
    run = shutil.copytree(made(1), tmp_path / "changed")

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if (row["group_index"], row["sample_index"]) == (8, 0):
                row["reward"] = 0.5

    change_rows(run, change)
    done = replay(run, "3")
    assert done.returncode == 1, done.stderr
    assert "step 3 of epoch 1 differs, the cause first:" in done.stdout
    first = done.stdout.split("the cause first:\n")[1].splitlines()[0]
    assert first.strip().startswith("advantage at east/spool/8/0: ")
    assert "weights after the step" in done.stdout
    assert "DIFFERENT: 1 of 1 steps" in done.stdout


def test_other_weights_at_a_step_that_has_a_checkpoint_are_located_by_tensor(made, tmp_path: Path):
    """The log-prob of one token was changed: step 2 comes out otherwise, and its checkpoint is there to compare with."""
    run = shutil.copytree(made(1), tmp_path / "changed")

    def change(rows: list[dict[str, Any]]) -> None:
        (row,) = [r for r in rows if (r["group_index"], r["sample_index"]) == (5, 1)]
        row["logprobs"][0] -= 1.5

    change_rows(run, change)
    done = replay(run, "2", "--json")
    assert done.returncode == 1, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["equal"]
    assert second["differences"][0]["where"].startswith("east/spool/5/1")
    assert second["tensors_apart"]


def test_another_checkpoint_than_the_one_that_it_ran_from_is_found_out(made, tmp_path: Path):
    run = shutil.copytree(made(1), tmp_path / "changed")
    lines = (run / VERSIONS_FILE).read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"result_digest": "0" * 32})
    (run / VERSIONS_FILE).write_text("\n".join(lines) + "\n")
    done = replay(run, "3")
    assert done.returncode == 1
    assert "weights before the step at" in done.stdout


def test_errors_name_what_is_missing(made, tmp_path: Path):
    run = shutil.copytree(made(1), tmp_path / "changed")
    done = replay(run, "17")
    assert (done.returncode, "no record of step 17; recorded: steps 1 to 4" in done.stderr) == (2, True)
    shutil.rmtree(run / "trajectories")
    done = replay(run, "4")
    assert done.returncode not in (0, 1)
    assert "step 3 of epoch 1 cannot be rebuilt: east/spool/7 is not recorded" in done.stderr
    (recorded_steps(run)[2].folder / FACTS_FILE).unlink()
    done = replay(run, "4")
    assert "step 3 of epoch 1 has no record" in done.stderr


def test_facts_tell_what_a_replay_needs(made):
    facts = read_facts(recorded_steps(made(2))[0])
    assert (facts.world_size, facts.settings["learner"]["zero_stage"], facts.forks) == (2, 2, {1: 0})
