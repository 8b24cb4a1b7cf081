"""kill −9 of a producer, the learner, a region's Redis and the hub's, one after the other: the run completes, the ledger
balances, nothing is left behind. Everything is real; only the model is smaller than the demo's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from anabranch.schemas.metrics import NoteRecord, StepRecord
from anabranch.transport.metrics_log import METRICS_FILE, read_records
from tests.pipeline import COMMAND, QUIET_THREADS
from tests.tiny import build_checkpoint

STEPS = 24
BATCH = 6
CONFIG = """
[model]
path = "{root}/model"
[task]
dataset = "count_bits"
params = {{ min_n = 1, max_n = 60 }}
question_pattern = "number (.*)"
answer_pattern = "([1-5])"
max_prompt_tokens = 16
heldout_size = 8
[sampling]
group_size = 4
max_tokens = 16
temperature = 1.2
[producer]
max_model_len = 64
max_num_seqs = 24
kv_cache_bytes = 33554432
groups_in_flight = 3
permit_lease_ms = 5000
[learner]
steps = {steps}
groups_per_step = {batch}
lr = 1e-3
checkpoint_every = 4
[correction]
max_age = 3
"""


class Run:
    def __init__(self, root: Path) -> None:
        self.root, self.directory = root, root / "runs/survive"
        (root / "config.toml").write_text(CONFIG.format(root=root, steps=STEPS, batch=BATCH))
        self.output = (root / "demo.log").open("wb")
        self.process = subprocess.Popen(
            [
                *COMMAND,
                "demo",
                "--config",
                str(root / "config.toml"),
                "--name",
                "survive",
                "--set",
                f"run.dir={root}/runs",
            ],
            env=os.environ | QUIET_THREADS,
            stdout=self.output,
            stderr=self.output,
            cwd=root,
        )

    def records(self) -> list[StepRecord | NoteRecord]:
        try:
            return [r for r in read_records(self.directory / METRICS_FILE) if isinstance(r, StepRecord | NoteRecord)]
        except FileNotFoundError:
            return []

    def last_step(self) -> int:
        return max((r.step for r in self.records() if isinstance(r, StepRecord)), default=0)

    def wait_for_step(self, step: int, deadline_s: float = 150) -> None:
        end = time.monotonic() + deadline_s
        while self.last_step() < step:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, f"step {step} not reached in {deadline_s} s\n{self.log()}"
            time.sleep(0.05)

    def pids(self, *words: str) -> list[int]:
        """Processes of this run whose command line or working directory holds all `words`."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace") + os.readlink(entry / "cwd")
            except OSError:
                continue
            if str(self.root) in line and all(word in line for word in words) and "demo" not in line.split("\0"):
                found.append(int(entry.name))
        return found

    def kill_one(self, *words: str) -> None:
        pids = self.pids(*words)
        assert pids, f"no process with {words} runs\n{self.log()}"
        os.kill(pids[0], signal.SIGKILL)

    def log(self) -> str:
        logs = sorted((self.directory / "logs").glob("*.log")) if self.directory.exists() else []
        parts = [(self.root / "demo.log").read_text(errors="replace")[-3000:]]
        parts += [f"== {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs]
        return "\n".join(parts)


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_run_survives_kill_9_of_every_kind_of_process(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", family="qwen3", tied=True)
    run = Run(tmp_path)
    try:
        run.wait_for_step(2, deadline_s=240)
        run.kill_one("produce", "west")
        run.wait_for_step(6)
        run.kill_one("learn", "--config")
        run.wait_for_step(10)
        run.kill_one("valkey-server", "redis-east") if run.pids("valkey-server", "redis-east") else run.kill_one(
            "redis-east"
        )
        run.wait_for_step(14)
        run.kill_one("valkey-server", "/hub")
        assert run.process.wait(240) == 0, run.log()
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run did not end\n{run.log()}")
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(60)
        run.output.close()

    assert run.last_step() == STEPS
    resumed = [r for r in run.records() if isinstance(r, NoteRecord) and r.what == "resumed"]
    assert resumed, "the killed learner resumed from a checkpoint"
    ledger = json.loads((run.directory / "ledger.json").read_text())
    assert set(ledger) == {"east", "west"}
    consumed = 0
    for region, counts in ledger.items():
        fates = counts["fates"]
        assert counts["produced"] == counts["pending"] + sum(fates.values()), (region, counts)
        assert counts["pending"] == 0, (region, counts)
        consumed += fates.get("trained", 0) + fates.get("dropped:zero_variance", 0)
    assert consumed == STEPS * BATCH, "every group index was consumed exactly once"

    rows = ds.dataset(run.directory / "trajectories", partitioning="hive").to_table(
        columns=["region", "entry_id", "sample_index"]
    )
    assert rows.num_rows == sum(c["produced"] for c in ledger.values()) * 4, (
        "the recorder has neither holes nor doubles"
    )
    assert len({tuple(r.values()) for r in rows.to_pylist()}) == rows.num_rows
    assert run.pids() == []
