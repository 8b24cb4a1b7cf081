"""The benchmark of weight updates runs, loses nothing, and reports what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import build_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

PROGRAM = """
import json, sys
from pathlib import Path
from anabranch.producers.bench_swap import bench_swap
from anabranch.schemas.config import ProducerSection, SamplingSection
print(json.dumps(bench_swap(Path(sys.argv[1]), ProducerSection(), SamplingSection(), swaps=3, density=0.01, pairs=2,
                            window_s=1.0, every_s=0.4)))
"""


def test_updates_go_through_while_requests_run_and_none_is_lost(tmp_path: Path) -> None:
    model_dir = build_checkpoint(tmp_path / "model")
    command = [sys.executable, "-I", "-c", PROGRAM, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert (figures["swaps"], figures["requests_lost"], figures["batch"]) == (3, 0, 16)
    assert figures["swap_pause_ms_median"] > 0
    assert figures["pause_in_decode_steps"] == figures["swap_pause_ms_median"] / figures["decode_step_ms_median"]
    assert {"throughput_lost_percent", "throughput_lost_percent_error", "engine_cpu_lost_percent"} <= figures.keys()
