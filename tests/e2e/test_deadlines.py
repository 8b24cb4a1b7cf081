"""Rollouts that take longer than they may, in a real engine and in a whole run: they are sampled anew, and nobody waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from anabranch.producers.running_groups import Ending, RunningGroup, RunningGroups
from anabranch.schemas.config import RunConfig
from anabranch.schemas.metrics import StepRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.metrics_log import read_records
from anabranch.transport.permits import Permit
from anabranch.transport.wiring import connect_hub
from tests.e2e.lab import Lab, prompts
from tests.pipeline import pipeline
from tests.tiny import EOS_ID, build_checkpoint

TOLERANCE = 1e-4
ENDS = [
    EOS_ID,
    *range(0, 256, 7),
]  # so many tokens end a completion that short ones are common and long ones are not rare


def sampled(lab: Lab, *, attempt: int) -> list[tuple[RunningGroup, Ending]]:
    """Two groups of six in a real engine, with a clock that counts its steps: 12 for a rollout, 60 for a group."""
    steps = [0]
    config = RunConfig.model_validate(
        {
            "producer": {"rollout_deadline_s": 12.0, "group_deadline_s": 60.0, "max_model_len": 640},
            "sampling": {"group_size": 6, "min_group_size": 2, "max_tokens": 40, "temperature": 0.7},
        }
    )
    groups = RunningGroups(lab.engine, config, clock=lambda: float(steps[0]))
    for index, prompt in enumerate(prompts(2, 24, 5)):
        groups.start(Permit(index, attempt, PolicyVersion(1, 0)), cast(Any, None), prompt)
    ended: list[tuple[RunningGroup, Ending]] = []
    while len(groups):
        for finished in lab.engine.step():
            assert groups.take(finished)
        steps[0] += 1
        assert steps[0] < 100, "a group outlived its deadline"
        ended += groups.turn()
    assert not lab.engine.has_unfinished
    assert groups.counts.rollouts_aborted > 0
    assert groups.counts.rollouts_retried > 0
    return sorted(ended, key=lambda row: row[0].index)


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_aborting_rollouts_leaves_the_others_as_they_were(keep_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_lab.engine, "_stop_token_ids", ENDS)
    keep_lab.begin(3)
    first, again, other = (sampled(keep_lab, attempt=attempt) for attempt in (0, 0, 1))

    def tokens(ended: list[tuple[RunningGroup, Ending]]) -> list[dict[int, list[int]]]:
        return [{s.number: s.finished.token_ids.tolist() for s in group.samples if s.finished} for group, _ in ended]

    assert {ending for _, ending in first} <= {Ending.COMPLETE, Ending.PARTIAL}
    assert tokens(first) == tokens(again), "who is aborted and what replaces it is a function of the run's seed"
    assert tokens(first) != tokens(other), "another attempt is another try"
    for group, _ in first:
        for sample in group.samples:
            if sample.finished is not None:
                assert len(sample.finished.token_ids) <= 12
                assert keep_lab.judge(group.prompt_ids, sample.finished).max() < TOLERANCE


CONFIG = """
[run]
name = "late"
dir = "{root}/runs"
[model]
path = "{root}/model"
[task]
dataset = "count_bits"
params = {{ min_n = 1, max_n = 3 }}
question_pattern = "number (.*)"
max_prompt_tokens = 64
heldout_size = 1
[sampling]
group_size = 8
min_group_size = 2
max_tokens = 64
[producer]
max_model_len = 128
max_num_seqs = 24
kv_cache_bytes = 33554432
groups_in_flight = 3
rollout_deadline_s = 0.02
group_deadline_s = 2
[learner]
steps = 4
groups_per_step = 4
evaluate = false
[correction]
max_age = 1
[regions.east]
"""


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.timeout(420)
def test_a_run_whose_rollouts_keep_missing_their_deadline_completes(tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path / "model", family="qwen3", tied=True)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    with pipeline(tmp_path, ["east"], CONFIG.format(root=tmp_path)) as run:
        run.start("learner", "learn")
        run.start("producer", "produce", "--region", "east")
        run.wait_for_all(deadline_s=300)
        hub = connect_hub(run.config)
        (status,) = hub.runs.producers(within_ms=300_000).values()
        hub.close()
    records = [r for r in read_records(tmp_path / "runs/late/metrics.jsonl") if isinstance(r, StepRecord)]
    assert [(r.step, r.groups) for r in records] == [(step, 4) for step in range(1, 5)]
    assert all(8 <= r.rollouts <= 32 for r in records)
    assert status.rollouts_aborted > 0
    assert status.rollouts_retried > 0
    assert status.tokens_cut > 0
    assert sum(r.partial_groups for r in records) <= status.groups_partial
