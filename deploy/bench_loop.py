"""`anabranch bench loop`: a short demo, and what its summary measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from anabranch.deploy.demo_options import DemoOptions, resolve
from anabranch.deploy.topology import cache_directory, program
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError

FIGURES = (
    "steps", "wall_s", "s_per_step", "wait_share", "tokens_per_s", "swap_pause_ms_median", "publish_to_serve_ms_median",
    "delta_bytes_median", "full_bytes", "changed_fraction_median", "age_mean", "age_max",
)  # fmt: skip


def bench_loop(*, preset: str, steps: int) -> dict[str, Any]:
    """Run `anabranch demo --preset PRESET --steps STEPS` in a temporary folder and return `FIGURES` of its summary.

    The demo's output goes to stderr. Raises AnabranchError if it does not complete.
    """
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder:
        argv = program("demo", "--preset", preset, "--steps", str(steps), "--name", "bench", "--set", f"run.dir={folder}",
                       "--set", "learner.evaluate=false")  # fmt: skip
        done = subprocess.run(argv, stdout=sys.stderr)
        if done.returncode:
            raise AnabranchError(f"the demo ended with {done.returncode}; its output is above")
        summary = json.loads((Path(folder) / "bench" / "summary.json").read_text())
    return {name: summary[name] for name in FIGURES} | {"machine": summary["machine"]}


def preset_config(preset: str) -> RunConfig:
    """The configuration of `preset`, with `model.path` naming its model, which is made if it is not in the cache yet.

    Raises AnabranchError if it cannot be made; the reason is on stderr.
    """
    target = cache_directory(os.environ) / "models" / preset
    made = subprocess.run(program("model", preset, "--out", str(target)), stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise AnabranchError(f"the model of preset {preset} could not be made (exit {made.returncode})")
    return resolve(DemoOptions(preset=preset), [f"model.path={json.dumps(made.stdout.strip().splitlines()[-1])}"])
