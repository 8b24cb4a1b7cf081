"""A learner of two ranks in the whole loop: ZeRO-2, held-out evaluation on either side, every swap verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.ledger import read_ledger
from anabranch.schemas.metrics import EvaluationRecord, StepRecord
from anabranch.transport.metrics_log import read_records
from tests.pipeline import pipeline
from tests.tiny import build_checkpoint

STEPS, BATCH = 4, 6
CONFIG = """
[run]
name = "ranks"
dir = "{root}/runs"
[model]
path = "{root}/model"
[task]
dataset = "count_bits"
params = {{ min_n = 1, max_n = 60 }}
question_pattern = "number (.*)"
answer_pattern = "([1-5])"
max_prompt_tokens = 16
heldout_size = 16
[sampling]
group_size = 8
max_tokens = 16
temperature = 1.2
[producer]
max_model_len = 64
max_num_seqs = 48
kv_cache_bytes = 33554432
groups_in_flight = 6
verify_every_updates = 1
[learner]
world_size = 2
zero_stage = 2
steps = {steps}
groups_per_step = {batch}
lr = 3e-3
checkpoint_every = 2
[correction]
max_age = 2
[regions.east]
[regions.west]
"""


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.timeout(360)
def test_two_ranks_learn_from_a_producer_in_one_of_two_regions(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", family="llama", tied=False)
    text = CONFIG.format(root=tmp_path, steps=STEPS, batch=BATCH)
    with pipeline(tmp_path, ["east", "west"], text) as run:
        run.start("learner", "learn")
        run.start("producer", "produce", "--region", "west")
        run.wait_for_all(deadline_s=300)
        ledger = read_ledger(run.config)
    records = list(read_records(tmp_path / "runs/ranks/metrics.jsonl"))
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert [r.step for r in steps] == [1, 2, 3, 4]
    assert max(r.changed_fraction for r in steps) > 0
    evaluations = [r for r in records if isinstance(r, EvaluationRecord)]
    assert [(r.version, r.prompts) for r in evaluations] == [(0, 16), (STEPS, 16)]
    assert ledger["east"].produced == 0
    assert ledger["west"].balanced
    consumed = {f: n for f, n in ledger["west"].fates.items() if f in ("trained", "dropped:zero_variance")}
    assert sum(consumed.values()) == STEPS * BATCH
    assert (tmp_path / "runs/ranks/model/model.safetensors").exists()
