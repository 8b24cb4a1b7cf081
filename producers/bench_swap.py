"""What a weight update costs an engine that is decoding: the pause of a swap beside a decode step, and throughput lost.

The whole receiving side runs as in a producer: a channel (in memory) gets versions that were encoded beforehand, the follower
fetches, verifies and decodes them on its thread, the swapper has them worked out beside the steps and swaps. Both figures are
ratios within one run. A version changes a random share of every tensor by one ULP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import CODEC, TensorChange, encode_anchor, encode_delta
from anabranch.kernels.workers import Workers
from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.producers.swapper import Swapper
from anabranch.producers.weight_follower import WeightFollower
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError, DeadlineError
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.transport.blob_store import blob_digest
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore

BATCH = 16
MODEL_LEN, PROMPT_TOKENS, NEW_TOKENS = 256, 16, 200
STEPS_BETWEEN_SWAPS = 4
UPDATE_DEADLINE_S = 60.0
RUN = "bench-swap"


class Versions:
    """A learner's side: versions encoded ahead, published when told to."""

    def __init__(self, model_dir: Path, density: float, seed: int, threads: int) -> None:
        self._image = Mirror.from_checkpoint(model_dir)
        self._density, self._rng, self._workers = density, np.random.default_rng(seed), Workers(threads)
        self.layout = self._image.layout
        self.store = MemoryWeightStore(RUN)
        self._channel = MemoryWeightChannel(self.store)
        self._channel.put_layout(self.layout)
        self._epoch = self._channel.open_epoch()
        self._waiting: list[tuple[Manifest, tuple[bytes, ...]]] = []
        first = encode_anchor(self.layout, self._bits(), self._workers)
        self.digest = self._image.digest()
        self._made = 0
        self._waiting.append((self._manifest("anchor", first.chunks, 0, None), first.chunks))

    def prepare(self, count: int) -> None:
        for _ in range(count):
            before = {name: bits.copy() for name, bits in self._bits().items()}
            self._image.apply(self._nudge(name, bits) for name, bits in before.items())
            base = Base(epoch=self._epoch, version=self._made, digest=self.digest)
            encoded = encode_delta(self.layout, before, self._bits(), self._workers)
            self.digest, self._made = self._image.digest(), self._made + 1
            manifest = self._manifest("delta", encoded.chunks, encoded.changed_elements, base)
            self._waiting.append((manifest, encoded.chunks))

    def publish(self) -> Manifest:
        manifest, chunks = self._waiting.pop(0)
        for chunk in chunks:
            self._channel.blobs.put(chunk)
        manifest = manifest.model_copy(update={"published_ms": time.time_ns() // 1_000_000})
        self._channel.commit(manifest)
        return manifest

    def close(self) -> None:
        self._workers.close()
        self._image.close()

    def _bits(self) -> dict[str, Any]:
        return {t.name: self._image.tensor_bits(t.name) for t in self.layout.tensors}

    def _nudge(self, name: str, bits: Any) -> TensorChange:
        count = max(1, int(bits.size * self._density))
        indices = np.unique(self._rng.integers(0, bits.size, count))
        return TensorChange(name, indices, bits[indices] ^ 1)

    def _manifest(self, kind: Any, chunks: tuple[bytes, ...], changed: int, base: Base | None) -> Manifest:
        total = sum(t.numel for t in self.layout.tensors)
        return Manifest(
            kind=kind,
            run=RUN,
            epoch=self._epoch,
            version=self._made,
            base=base,
            result_digest=self.digest,
            layout_hash=self.layout.hash,
            codec=CODEC,
            chunks=tuple(Chunk(digest=blob_digest(c), size_bytes=len(c)) for c in chunks),
            full_bytes=self.layout.payload_bytes,
            changed_elements=changed if base else total,
            total_elements=total,
            learner_step=self._made,
            fork_version=0,
            published_ms=0,
        )


class Decoder:
    """Keeps `BATCH` requests decoding; every one must come back whole."""

    def __init__(self, engine: RolloutEngine, seed: int) -> None:
        self._engine, self._rng = engine, np.random.default_rng(seed)
        self._submitted = self._finished = self.short = 0
        self.steps_ms: list[float] = []

    @property
    def running(self) -> int:
        return self._submitted - self._finished

    def step(self) -> int:
        """One engine step with `BATCH` requests; returns how many tokens it sampled."""
        while self.running < BATCH:
            prompt = self._rng.integers(1, 200, PROMPT_TOKENS).tolist()
            self._engine.submit(str(self._submitted), prompt, seed=self._submitted, max_tokens=NEW_TOKENS)
            self._submitted += 1
        started = time.perf_counter()
        tokens = self.running
        self._take()
        self.steps_ms.append(1e3 * (time.perf_counter() - started))
        return tokens

    def drain(self) -> int:
        """Let all end; returns how many never came back, or came back without all of their tokens."""
        while self._engine.has_unfinished:
            self._take()
        return self.running + self.short

    def _take(self) -> None:
        for finished in self._engine.step():
            self._finished += 1
            if finished.finish_reason != "stop" and len(finished.token_ids) != NEW_TOKENS:
                self.short += 1


@dataclass(frozen=True, slots=True)
class _Window:
    """`own_s`: CPU time of the thread that decodes and swaps; `background_s`: of all others of the process."""

    tokens: int
    updates: int
    wall_s: float
    own_s: float
    background_s: float


class _Bench:
    def __init__(self, engine: RolloutEngine, versions: Versions, config: ProducerSection, seed: int) -> None:
        self.versions, self.engine = versions, engine
        self._mirror = open_node_mirror(engine.layout, run=f"{RUN}-{time.time_ns()}", codec_threads=1)
        channel = MemoryWeightChannel(versions.store)
        self._follower = WeightFollower(channel, self._mirror, run=RUN, poll_ms=config.poll_ms)
        self._swapper = Swapper(engine, self._follower, config)
        self.decoder = Decoder(engine, seed)
        self._follower.start()

    def close(self) -> None:
        self._follower.close()
        self._mirror.close()

    def serve(self, manifest: Manifest, step: Callable[[], object]) -> None:
        """Go on until the engine serves `manifest`."""
        give_up_s = time.monotonic() + UPDATE_DEADLINE_S
        while self.engine.policy != manifest.policy:
            self._swapper.turn()
            step()
            if time.monotonic() > give_up_s:
                raise DeadlineError.waiting_for(
                    f"the engine to serve {manifest.policy}", UPDATE_DEADLINE_S, self._follower.last_error
                )

    def pauses_ms(self, swaps: int) -> list[float]:
        pauses = []
        for _ in range(swaps):
            self.serve(self.versions.publish(), self.decoder.step)
            pauses.append(self._swapper.pause_ms)
            for _ in range(STEPS_BETWEEN_SWAPS):
                self.decoder.step()
        return pauses

    def window(self, window_s: float, every_s: float | None) -> _Window:
        """One window, with an update every `every_s`, the first after half of that."""
        started, own_s, all_s = time.perf_counter(), time.thread_time(), time.process_time()
        tokens, updates, due_s = 0, 0, started + every_s / 2 if every_s else float("inf")
        while (now := time.perf_counter()) - started < window_s:
            if now >= due_s:
                self.versions.publish()
                updates, due_s = updates + 1, due_s + (every_s or 0.0)
            self._swapper.turn()
            tokens += self.decoder.step()
        wall_s, own_s = time.perf_counter() - started, time.thread_time() - own_s
        return _Window(tokens, updates, wall_s, own_s, time.process_time() - all_s - own_s)

    def catch_up(self) -> None:
        """To the head, so that no update of one window is swapped in the next."""
        head = self.versions.store.head
        assert head is not None
        while self.engine.policy is None or self.engine.policy < head:
            self._swapper.turn()
            self.decoder.step()


def bench_swap(
    model_dir: Path,
    producer: ProducerSection,
    sampling: SamplingSection,
    *,
    swaps: int,
    density: float,
    pairs: int,
    window_s: float,
    every_s: float,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Figures by name, units in the names: `swaps` updates one after the other, then `pairs` windows with one update every
    `every_s` beside windows with none, in turn.

    Raises:
        AnabranchError: the live engine's digest differs from the learner's at the end.
        DeadlineError: an update did not come through.
    """
    limits = {"max_model_len": MODEL_LEN, "max_num_seqs": BATCH, "kv_cache_bytes": max(2**28, producer.kv_cache_bytes)}
    producer = producer.model_copy(update=limits)
    tell("loading the engine")
    engine = RolloutEngine(model_dir, producer, sampling, seed=seed)
    versions = Versions(model_dir, density, seed, threads=2)
    bench = _Bench(engine, versions, producer, seed)
    try:
        tell("encoding the versions")
        versions.prepare(swaps + 1 + pairs * int(window_s / every_s + 1.5))
        bench.serve(versions.publish(), lambda: time.sleep(0.001))
        bench.serve(versions.publish(), bench.decoder.step)  # warm-up of everything
        bench.window(min(window_s, 2.0), None)
        bench.decoder.steps_ms.clear()
        tell("swaps")
        pauses = bench.pauses_ms(swaps)
        steps = bench.decoder.steps_ms[:]
        windows: dict[bool, list[_Window]] = {False: [], True: []}
        for pair in range(pairs):
            for updates in (False, True) if pair % 2 else (True, False):
                tell(f"pair {pair + 1} of {pairs}")
                windows[updates].append(bench.window(window_s, every_s if updates else None))
                bench.catch_up()
        lost = bench.decoder.drain()
        bench.catch_up()
        head = versions.store.head
        live, told = engine.live_digest(), _published_digest(versions)
        if live != told:
            raise AnabranchError(f"the live engine's weights are not those of {head}: {live}, {told}")
    finally:
        bench.close()
        engine.close()
        versions.close()
    pause, step = statistics.median(pauses), statistics.median(steps)
    return {
        "parameters": sum(t.numel for t in versions.layout.tensors),
        "dtype": producer.dtype,
        "kv_policy": producer.kv_policy,
        "batch": BATCH,
        "density": density,
        "swaps": swaps,
        "swap_pause_ms_median": pause,
        "swap_pause_ms_p90": float(np.percentile(pauses, 90)),
        "decode_step_ms_median": step,
        "pause_in_decode_steps": pause / step,
        "requests_lost": lost,
        "update_every_s": every_s,
        "pairs_of_windows": pairs,
        "window_s": window_s,
        **_throughput(windows[True], windows[False]),
    }


def _throughput(on: Sequence[_Window], off: Sequence[_Window]) -> dict[str, float]:
    """What the updates cost. By the clock, which other load on the machine disturbs; and by the CPU time of the thread that
    decodes, which it hardly does, and which sees neither waiting nor what others do in the background."""
    if not on:
        return {}
    clock = [100 * (1 - (a.tokens / a.wall_s) / (b.tokens / b.wall_s)) for a, b in zip(on, off, strict=True)]
    own = [100 * (1 - (a.tokens / a.own_s) / (b.tokens / b.own_s)) for a, b in zip(on, off, strict=True)]
    idle = statistics.median(w.background_s / w.wall_s for w in off)
    background = [1e3 * (w.background_s - idle * w.wall_s) / max(1, w.updates) for w in on]
    figures = {
        "tokens_per_s_without": statistics.median(w.tokens / w.wall_s for w in off),
        "tokens_per_s_with": statistics.median(w.tokens / w.wall_s for w in on),
        "throughput_lost_percent": statistics.mean(clock),
        "throughput_lost_percent_median": statistics.median(clock),
        "engine_cpu_lost_percent": statistics.mean(own),
        "background_cpu_ms_per_update": statistics.median(background),
    }
    if len(on) > 1:
        figures["throughput_lost_percent_error"] = statistics.stdev(clock) / len(on) ** 0.5
        figures["engine_cpu_lost_percent_error"] = statistics.stdev(own) / len(on) ** 0.5
    return figures


def _published_digest(versions: Versions) -> str:
    head = versions.store.head
    assert head is not None
    (manifest,) = MemoryWeightChannel(versions.store).manifests([(head, "delta")])
    assert manifest is not None
    return manifest.result_digest
