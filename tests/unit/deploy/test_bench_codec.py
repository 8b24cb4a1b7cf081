"""Measuring formats: every one is checked, none is in another's way, and fewer runs are made of slow ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.deploy import bench_codec
from anabranch.deploy.bench_codec import Effort, bench_deltas, busy_elsewhere, measure, on_cores
from anabranch.deploy.codec_pair import load_pair
from anabranch.deploy.codec_peers import Format, IndexValue, peers
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import AnabranchError, UsageError
from tests.unit.deploy.step_pairs import CHANGED, Array, write, write_pair

QUICK = Effort(repeats=1, budget_s=1.0)
KEYS = {"format", "threads", "bytes_per_change", "encode_mb_s", "decode_mb_s"}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path)


def test_a_pair_without_a_change_has_no_bytes_per_change(prefix: str) -> None:
    write(Path(prefix + ".change.safetensors"), {})
    with pytest.raises(UsageError, match=r"nothing changed in step\.1"):
        bench_deltas(load_pair(prefix), peers(), QUICK, lambda _: None)


def test_one_row_for_each_format_and_thread_count(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "thread_counts", lambda: [1, 3])
    pair = load_pair(prefix)
    rows = bench_deltas(pair, peers(), QUICK, lambda _: None)
    assert [(r["format"], r["threads"]) for r in rows] == [(c.name, t) for c in peers() for t in (1, 3)]
    assert all(r.keys() == KEYS for r in rows)
    assert all(min(r["encode_mb_s"], r["decode_mb_s"], r["bytes_per_change"]) > 0 for r in rows)
    size = len(IndexValue().encode(pair.base, pair.new, Workers()))
    assert rows[0]["bytes_per_change"] == pytest.approx(size / CHANGED), "of the complete file, for what really changed"


class Wrong(IndexValue):
    """Loses the last change."""

    name = "wrong"

    def decode(self, state: dict[str, Array], encoded: bytes, workers: Workers) -> Any:
        decoded = dict(super().decode(state, encoded, workers))
        decoded["a.index"][39] ^= 1
        return decoded


class Clock:
    """Tells the time that `Slow` takes, and no other: how busy the machine is does not show."""

    monotonic, process_time, sleep = time.monotonic, time.process_time, time.sleep

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(IndexValue):
    name = "slow"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        self.clock.now += 0.05
        return super().encode(base, new, workers)


def test_a_format_that_is_not_exact_is_not_reported(prefix: str) -> None:
    with pytest.raises(AnabranchError, match=r"wrong did not give back the new weights of step\.1: tensor 'a\.index'"):
        bench_deltas(load_pair(prefix), [Wrong()], QUICK, lambda _: None)


def test_a_slow_format_gets_fewer_runs(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("anabranch.deploy.bench_codec.time", clock)
    formats: list[Format] = [IndexValue(), Slow(clock)]
    quick, slow = measure(load_pair(prefix), formats, 1, Effort(repeats=9, budget_s=0.12), lambda _: None)
    assert len(quick.encode_s) == 9
    assert len(slow.encode_s) == 3, "0.05 s each: the third crosses the budget"


class Lingering(IndexValue):
    """Returns while a thread of its own still computes, as arc_v3 does."""

    name = "lingering"
    threads: list[threading.Thread]

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        def compute() -> None:
            end = time.thread_time() + 0.15
            while time.thread_time() < end:
                pass

        self.threads.append(threading.Thread(target=compute))
        self.threads[-1].start()
        return super().encode(base, new, workers)


class Watching(IndexValue):
    """Notes for each run whether a thread of `beside` is still at work."""

    name = "watching"

    def __init__(self, beside: Lingering) -> None:
        self.beside = beside
        self.seen: list[bool] = []

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        self.seen.append(any(thread.is_alive() for thread in self.beside.threads))
        return super().encode(base, new, workers)


def test_what_one_format_leaves_running_is_not_taken_from_the_next(prefix: str) -> None:
    lingering = Lingering()
    lingering.threads = []
    watching = Watching(lingering)
    measure(load_pair(prefix), [lingering, watching], 1, Effort(repeats=2), lambda _: None)
    assert len(lingering.threads) >= 3
    assert len(watching.seen) >= 3
    assert not any(watching.seen)


def test_decoding_starts_from_the_base_every_time(prefix: str) -> None:
    """XOR applied twice would undo itself."""
    pair = load_pair(prefix)
    kept = {name: bits.copy() for name, bits in pair.base.items()}
    measure(pair, peers(), 1, Effort(repeats=2), lambda _: None)
    assert all(np.array_equal(kept[name], bits) for name, bits in pair.base.items())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot keep a thread to a core")
def test_one_thread_is_one_core() -> None:
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what others use")
def test_the_work_of_other_processes_is_noticed() -> None:
    busy = busy_elsewhere()
    spin = "import time; end = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-I", "-c", spin], check=True, timeout=20)
    assert busy() > 0.5
