"""Speed of the rollout engine on a checkpoint: start-up, decode steps, tokens/s, and the pause of a weight swap.

    OMP_NUM_THREADS=1 python -I benchmarks/engine.py MODEL_DIR [--dtype float32] [--kv-policy keep]

Prints one JSON object per line. A swap's pause is the time during which no step can run; next to it stands the median
decode step of the same batch, since a pause below one step costs less than one token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.versions import PolicyVersion

PROMPT_TOKENS, NEW_TOKENS, SWAP_EVERY_STEPS = 24, 200, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kv-policy", default="keep", choices=["keep", "recompute"])
    arguments = parser.parse_args()

    started = time.perf_counter()
    config = ProducerSection(dtype=arguments.dtype, kv_policy=arguments.kv_policy)
    engine = RolloutEngine(arguments.model_dir, config, SamplingSection(), seed=0)
    mirror = Mirror.from_checkpoint(arguments.model_dir)
    engine.swap(mirror, PolicyVersion(1, 0), {})
    parameters = sum(t.numel for t in mirror.layout.tensors)
    _print("start", seconds=round(time.perf_counter() - started, 1), parameters=parameters, dtype=arguments.dtype)

    _run(engine, mirror, batch=64, fraction=None)  # warm-up, not reported
    for batch in (1, 16, 64):
        tokens_per_s, step_ms, _ = _run(engine, mirror, batch=batch, fraction=None)
        _print("decode", batch=batch, tokens_per_s=round(tokens_per_s), step_ms_median=round(step_ms, 2))
    for fraction in (0.001, 0.02, 1.0):
        _, step_ms, pauses = _run(engine, mirror, batch=16, fraction=fraction)
        _print(
            "swap", changed_fraction=fraction, pause_ms_median=round(float(np.median(pauses)), 2),
            pause_ms_max=round(max(pauses), 2), step_ms_median=round(step_ms, 2), kv_policy=arguments.kv_policy,
        )  # fmt: skip
    engine.close()


def _run(
    engine: RolloutEngine, mirror: Mirror, *, batch: int, fraction: float | None
) -> tuple[float, float, list[float]]:
    """Tokens/s, median step in ms, and the pauses in ms of swaps of `fraction` of every tensor (None: no swaps)."""
    rng = np.random.default_rng(0)
    for i, prompt in enumerate(rng.integers(0, 200, (batch, PROMPT_TOKENS))):
        engine.submit(str(i), prompt.tolist(), seed=i, max_tokens=NEW_TOKENS)
    tokens, steps, pauses = 0, [], []
    while engine.has_unfinished:
        started = time.perf_counter()
        tokens += sum(len(f.token_ids) for f in engine.step())
        steps.append(1e3 * (time.perf_counter() - started))
        if fraction is not None and len(steps) % SWAP_EVERY_STEPS == 0:
            changed = {
                t.name: None if fraction == 1.0 else np.flatnonzero(rng.random(t.numel) < fraction)
                for t in mirror.layout.tensors
            }
            assert engine.policy is not None
            pauses.append(1e3 * engine.swap(mirror, PolicyVersion(1, engine.policy.version + 1), changed).pause_s)
    return tokens / (sum(steps) / 1e3), float(np.median(steps)), pauses


def _print(what: str, **values: object) -> None:
    print(json.dumps({"bench": f"engine.{what}", **values}), flush=True)


if __name__ == "__main__":
    main()
