"""Two tensor-parallel workers, each a process with a part of every fused parameter: same digests, same refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import build_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.versions import PolicyVersion


def main() -> None:
    model_dir, rng = Path(sys.argv[1]), np.random.default_rng(0)
    mirror = Mirror.from_checkpoint(model_dir)
    config = ProducerSection(tensor_parallel_size=2, kv_policy="recompute", kv_cache_bytes=2**24)
    engine = RolloutEngine(model_dir, config, SamplingSection(), seed=0)
    assert engine.live_digest() == mirror.digest(), "after loading"
    engine.swap(mirror, PolicyVersion(1, 0), {})
    for i in range(3):
        engine.submit(str(i), [65 + i] * 20, seed=i, max_tokens=24)
    spans = []
    for version, fraction in enumerate((0.001, 0.02, 0.3), start=1):
        for _ in range(6):
            spans += [f.spans for f in engine.step()]
        changed = {}
        for spec in mirror.layout.tensors:
            where = np.flatnonzero(rng.random(spec.numel) < fraction)
            mirror.write(spec.name, where, mirror.tensor_bits(spec.name)[where] ^ np.uint16(1 << 5))
            changed[spec.name] = where
        engine.swap(mirror, PolicyVersion(1, version), changed)
        assert engine.live_digest() == mirror.digest(), f"after {fraction}"
    try:
        engine.swap(Mirror.from_checkpoint(model_dir), PolicyVersion(9, 9), {**changed, "model.norm.weight": np.array([64])})
    except DeltaError:
        assert engine.policy == PolicyVersion(1, 3) and engine.live_digest() == mirror.digest(), "after a refusal"
    else:
        raise AssertionError("an index out of range was accepted")
    while engine.has_unfinished:
        spans += [f.spans for f in engine.step()]
    assert len(spans) == 3 and max(len(s) for s in spans) == 4, spans
    engine.close()
    print("all good")


if __name__ == "__main__":
    main()
"""


def test_two_workers_hold_the_mirrors_weights_and_refuse_together(tmp_path: Path) -> None:
    model_dir = build_checkpoint(tmp_path / "model", tied=True)
    script = tmp_path / "run.py"  # a file: the workers are spawned, and import the main module
    script.write_text(SCRIPT)
    command = [sys.executable, "-I", str(script), str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.strip() == "all good", done.stderr[-3000:]
