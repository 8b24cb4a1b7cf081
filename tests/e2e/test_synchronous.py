"""`max_age = 0` is the synchronous run, bit for bit: real processes against a loop without Redis, permits or channel.

After every swap the producer compares the live engine's weights, mapped back to checkpoint names, with the digest that
the learner published (`verify_every_updates = 1`): it would end with an error if they differed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.schemas.metrics import StepRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.metrics_log import read_records
from anabranch.transport.wiring import connect_hub
from tests.pipeline import QUIET_THREADS, pipeline
from tests.tiny import build_checkpoint

STEPS = 4
REFERENCE = Path(__file__).with_name("reference_loop.py")

# A random model writes noise; among 16 characters of it a 1 or a 2 is the right answer often enough to give gradient.
CONFIG = """
[run]
name = "sync"
dir = "{root}/runs"
[model]
path = "{root}/model"
[task]
dataset = "count_bits"
params = {{ min_n = 1, max_n = 3 }}
question_pattern = "number (.*)"
answer_pattern = "([12])"
max_prompt_tokens = 64
heldout_size = 1
[sampling]
group_size = 8
max_tokens = 16
temperature = 1.2
[producer]
max_model_len = 96
max_num_seqs = 48
kv_cache_bytes = 33554432
groups_in_flight = 6
verify_every_updates = 1
[learner]
steps = {steps}
groups_per_step = 6
lr = 3e-3
checkpoint_every = 2
evaluate = false
[correction]
max_age = 0
[regions.east]
"""


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.timeout(420)
def test_max_age_zero_is_the_synchronous_run_bit_for_bit(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", family="qwen3", tied=True)
    with pipeline(tmp_path, ["east"], CONFIG.format(root=tmp_path, steps=STEPS)) as run:
        run.start("learner", "learn")
        run.start("producer", "produce", "--region", "east")
        run.wait_for_all(deadline_s=300)
        channel = connect_hub(run.config).channel
        manifests = channel.manifests([(PolicyVersion(1, v), "delta" if v else "anchor") for v in range(STEPS + 1)])
        channel.close()
    records = [r for r in read_records(tmp_path / "runs/sync/metrics.jsonl") if isinstance(r, StepRecord)]
    assert all(set(r.age_tokens) == {0} for r in records), "no token is older than the weights it trains"
    assert any(r.changed_fraction > 0 for r in records), "nothing was learned: the comparison would be empty"

    reference = subprocess.run(
        [sys.executable, "-I", str(REFERENCE), str(run.config_file)],
        env=os.environ | QUIET_THREADS,
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    expected = json.loads(reference.stdout.splitlines()[-1])
    assert [m.result_digest if m else None for m in manifests] == expected
