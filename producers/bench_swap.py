"""How long a weight swap stops a busy engine, against one decode step of the same engine in the same run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anabranch.kernels.delta_codec import TensorChange
from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.layout import DTYPE_BYTES
from anabranch.schemas.versions import PolicyVersion

BATCH = 16
STEPS_BETWEEN_SWAPS = 4


@dataclass(frozen=True, slots=True)
class SwapBench:
    parameters: int
    density: float
    swaps: int
    swap_pause_ms_median: float
    swap_pause_ms_p90: float
    decode_step_ms_median: float
    load_s: float
    requests_lost: int


def bench_swap(
    model_dir: Path, producer: ProducerSection, sampling: SamplingSection, *, swaps: int, density: float, seed: int = 0
) -> SwapBench:
    """Keep `BATCH` requests decoding and swap in `density` of the elements, changed by one ULP, every few steps.

    Raises:
        AnabranchError: the live engine's digest differs from the mirror's at the end.
    """
    rng = np.random.default_rng(seed)
    started = time.perf_counter()
    engine = RolloutEngine(model_dir, producer, sampling, seed=seed)
    load_s = time.perf_counter() - started
    mirror = Mirror.from_checkpoint(model_dir)
    try:
        engine.swap(mirror, PolicyVersion(1, 0), {})
        submitted = finished = 0
        pauses: list[float] = []
        steps: list[float] = []
        for version in range(1, swaps + 1):
            changes = [_nudge(mirror, t.name, density, rng) for t in mirror.layout.tensors if DTYPE_BYTES[t.dtype] == 2]
            mirror.apply(changes)
            report = engine.swap(mirror, PolicyVersion(1, version), {c.name: c.indices for c in changes})
            pauses.append(report.pause_s)
            for _ in range(STEPS_BETWEEN_SWAPS):
                while submitted - finished < BATCH:
                    engine.submit(str(submitted), rng.integers(1, 200, 16).tolist(), seed=submitted)
                    submitted += 1
                started = time.perf_counter()
                finished += len(engine.step())
                steps.append(time.perf_counter() - started)
        while engine.has_unfinished:
            finished += len(engine.step())
        if engine.live_digest() != mirror.digest():
            raise AnabranchError("the live engine's weights differ from the mirror after the benchmark")
        return SwapBench(
            parameters=sum(t.numel for t in mirror.layout.tensors),
            density=density,
            swaps=swaps,
            swap_pause_ms_median=1e3 * statistics.median(pauses),
            swap_pause_ms_p90=1e3 * float(np.percentile(pauses, 90)),
            decode_step_ms_median=1e3 * statistics.median(steps),
            load_s=load_s,
            requests_lost=submitted - finished,
        )
    finally:
        engine.close()
        mirror.close()


def _nudge(mirror: Mirror, name: str, density: float, rng: np.random.Generator) -> TensorChange:
    bits = mirror.tensor_bits(name)
    count = max(1, int(bits.size * density))
    indices = np.sort(rng.choice(bits.size, count, replace=False)).astype(np.int64)
    return TensorChange(name, indices, bits[indices] ^ 1)
