"""The rollout engine alone: decode speed, and how long a weight swap stops it, against one decode step of the same run."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import TensorChange
from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.versions import PolicyVersion

DECODE_BATCHES = (1, 16, 64)
SWAP_BATCH = 16
STEPS_BETWEEN_SWAPS = 4
PROMPT_TOKENS, NEW_TOKENS = 16, 40


def bench_engine(
    model_dir: Path, producer: ProducerSection, sampling: SamplingSection, *, swaps: int, density: float, seed: int = 0
) -> dict[str, Any]:
    """Decode at several batch sizes, then swap in `density` of the elements, changed by one ULP, every few steps while
    `SWAP_BATCH` requests decode.

    Returns:
        Figures by name, units in the names.

    Raises:
        AnabranchError: the live engine's digest differs from the mirror's at the end.
    """
    started = time.perf_counter()
    engine = RolloutEngine(model_dir, producer, sampling, seed=seed)
    load_s = time.perf_counter() - started
    mirror = Mirror.from_checkpoint(model_dir)
    try:
        engine.swap(mirror, PolicyVersion(1, 0), {})
        bench = _Bench(engine, mirror, np.random.default_rng(seed))
        bench.decode(DECODE_BATCHES[-1])  # warm-up, not reported
        decode = {batch: bench.decode(batch) for batch in DECODE_BATCHES}
        pauses, steps, lost = bench.swaps(swaps, density)
        if engine.live_digest() != mirror.digest():
            raise AnabranchError("the live engine's weights differ from the mirror after the benchmark")
        return {
            "parameters": sum(t.numel for t in mirror.layout.tensors),
            "dtype": producer.dtype,
            "kv_policy": producer.kv_policy,
            "load_s": load_s,
            **{f"tokens_per_s_batch_{batch}": tokens for batch, (tokens, _) in decode.items()},
            **{f"decode_step_ms_batch_{batch}": step for batch, (_, step) in decode.items()},
            "swaps": swaps,
            "swap_density": density,
            "swap_pause_ms_median": statistics.median(pauses),
            "swap_pause_ms_p90": float(np.percentile(pauses, 90)),
            f"swap_decode_step_ms_batch_{SWAP_BATCH}": statistics.median(steps),
            "swap_requests_lost": lost,
        }
    finally:
        engine.close()
        mirror.close()


class _Bench:
    def __init__(self, engine: RolloutEngine, mirror: Mirror, rng: np.random.Generator) -> None:
        self._engine, self._mirror, self._rng = engine, mirror, rng
        self._submitted = 0

    def decode(self, batch: int) -> tuple[float, float]:
        """Tokens/s and median step in ms with `batch` requests to their end."""
        for _ in range(batch):
            self._submit()
        tokens, steps = 0, []
        while self._engine.has_unfinished:
            started = time.perf_counter()
            tokens += sum(len(f.token_ids) for f in self._engine.step())
            steps.append(time.perf_counter() - started)
        return tokens / sum(steps), 1e3 * statistics.median(steps)

    def swaps(self, count: int, density: float) -> tuple[list[float], list[float], int]:
        """Pauses and steps in ms, and how many requests never came back."""
        first, finished = self._submitted, 0
        pauses, steps = [], []
        for version in range(1, count + 1):
            changes = [self._nudge(t.name, density) for t in self._mirror.layout.tensors]
            self._mirror.apply(changes)
            report = self._engine.swap(self._mirror, PolicyVersion(1, version), {c.name: c.indices for c in changes})
            pauses.append(1e3 * report.pause_s)
            for _ in range(STEPS_BETWEEN_SWAPS):
                while self._submitted - first - finished < SWAP_BATCH:
                    self._submit()
                started = time.perf_counter()
                finished += len(self._engine.step())
                steps.append(1e3 * (time.perf_counter() - started))
        while self._engine.has_unfinished:
            finished += len(self._engine.step())
        return pauses, steps, self._submitted - first - finished

    def _submit(self) -> None:
        prompt = self._rng.integers(1, 200, PROMPT_TOKENS).tolist()
        self._engine.submit(str(self._submitted), prompt, seed=self._submitted, max_tokens=NEW_TOKENS)
        self._submitted += 1

    def _nudge(self, name: str, density: float) -> TensorChange:
        bits = self._mirror.tensor_bits(name)
        count = max(1, int(bits.size * density))
        indices = np.sort(self._rng.choice(bits.size, count, replace=False)).astype(np.int64)
        return TensorChange(name, indices, bits[indices] ^ 1)
