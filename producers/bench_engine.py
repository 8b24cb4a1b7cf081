"""The rollout engine alone: decode speed, how long a weight swap stops it, against one decode step of the same run, and how
much generation a steady flow of updates costs."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
UPDATE_EVERY_S = 5.0


def bench_engine(
    model_dir: Path,
    producer: ProducerSection,
    sampling: SamplingSection,
    *,
    swaps: int,
    density: float,
    windows: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode at several batch sizes, then swap in `density` of the elements, changed by one ULP, every few steps while
    `SWAP_BATCH` requests decode; then `windows` times `UPDATE_EVERY_S` seconds without and with one such update, in turn.

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
        pairs = [(bench.window(None), bench.window(density)) for _ in range(windows)]
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
            "update_every_s": UPDATE_EVERY_S,
            "throughput_lost_median": statistics.median(1 - on / off for off, on in pairs) if pairs else float("nan"),
        }
    finally:
        engine.close()
        mirror.close()


class _Bench:
    def __init__(self, engine: RolloutEngine, mirror: Mirror, rng: np.random.Generator) -> None:
        self._engine, self._mirror, self._rng = engine, mirror, rng
        self._submitted = self._version = 0
        self._changed: dict[str, NDArray[np.int64] | None] | None = (
            None  # what was written into the mirror, not swapped in yet
        )

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
        for _ in range(count):
            self._apply(self._nudges(density))
            left = STEPS_BETWEEN_SWAPS
            while left:
                pause_s = self._swap_if_ready()
                if pause_s is not None:
                    pauses.append(1e3 * pause_s)
                left -= self._changed is None
                while self._submitted - first - finished < SWAP_BATCH:
                    self._submit()
                started = time.perf_counter()
                finished += len(self._engine.step())
                steps.append(1e3 * (time.perf_counter() - started))
        while self._engine.has_unfinished:
            finished += len(self._engine.step())
        return pauses, steps, self._submitted - first - finished

    def window(self, density: float | None) -> float:
        """Tokens/s over `UPDATE_EVERY_S` with `SWAP_BATCH` requests running; with a density, one update in the middle. Its
        changes are written into the mirror on this thread, which a producer leaves to its follower."""
        changes = None if density is None else self._nudges(density)
        running = tokens = 0
        started = time.perf_counter()
        while (now := time.perf_counter() - started) < UPDATE_EVERY_S:
            if changes is not None and now > UPDATE_EVERY_S / 3:
                self._apply(changes)
                changes = None
            self._swap_if_ready()
            for _ in range(SWAP_BATCH - running):
                self._submit()
            tokens += SWAP_BATCH  # one for each that runs
            running = SWAP_BATCH - len(self._engine.step())
        seconds = time.perf_counter() - started
        while self._engine.has_unfinished:
            self._engine.step()
        return tokens / seconds

    def _nudges(self, density: float) -> list[TensorChange]:
        return [self._nudge(t.name, density) for t in self._mirror.layout.tensors]

    def _apply(self, changes: list[TensorChange]) -> None:
        self._mirror.apply(changes)
        self._changed = {c.name: c.indices for c in changes}

    def _swap_if_ready(self) -> float | None:
        """Seconds that the swap of what was applied last took; None if there is nothing new, or it is still worked out."""
        if self._changed is None:
            return None
        policy = PolicyVersion(1, self._version + 1)
        if self._engine.has_unfinished and not self._engine.prepare(self._mirror, policy, self._changed):
            return None
        report = self._engine.swap(self._mirror, policy, self._changed)
        self._version, self._changed = policy.version, None
        return report.pause_s

    def _submit(self) -> None:
        prompt = self._rng.integers(1, 200, PROMPT_TOKENS).tolist()
        self._engine.submit(str(self._submitted), prompt, seed=self._submitted, max_tokens=NEW_TOKENS)
        self._submitted += 1

    def _nudge(self, name: str, density: float) -> TensorChange:
        bits = self._mirror.tensor_bits(name)
        count = max(1, int(bits.size * density))
        indices = np.sort(self._rng.choice(bits.size, count, replace=False)).astype(np.int64)
        return TensorChange(name, indices, bits[indices] ^ 1)
