"""`anabranch bench codec`: size and speed of our delta and of others', over one step pair in one process.

Invariant: every format is measured on the same arrays, in turn within each round, so that a busy moment of the machine
meets all alike; none is reported that did not give back the exact new bits; a figure is the median of its runs.
Held by tests/unit/deploy/test_bench_codec.py.

What is timed: encoding in memory from the two states (finding the changes included), and decoding into the new state
over a private copy of the base that was made before; threads are started before. What is counted: the complete file. MB/s are 10^6 bytes of the
whole new state per second. One thread means one core: the process is kept to it, also what a format starts by itself.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from anabranch.deploy.codec_ours import Delta, Snapshot
from anabranch.deploy.codec_packages import ArcV3, ZipNN
from anabranch.deploy.codec_pair import Pair, load_pair
from anabranch.deploy.codec_peers import Format
from anabranch.deploy.codec_peers import peers as simple_peers
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import AnabranchError, UsageError

Tell = Callable[[str], None]
_SETTLE_S, _STEADY_S, _LONG_S = 0.002, 0.05, 0.2
NOISY_CORES = 0.1  # what an idle system's own work stays below
Row = dict[str, Any]
A, B = TypeVar("A"), TypeVar("B")


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: `repeats` timed runs after one that is not, fewer once they took `budget_s` seconds."""

    repeats: int = 7
    budget_s: float = 20.0


@dataclass
class Measured:
    """Runs of one format at one thread count: seconds to encode, seconds to decode, size of the file in bytes."""

    format: str
    threads: int
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)

    @property
    def is_quick(self) -> bool:
        """A run is so short that how the machine was a moment before matters."""
        return not self.encode_s or self.encode_s[-1] + self.decode_s[-1] < _LONG_S

    def row(self, pair: Pair, changed: int) -> Row:
        """One object of --json. A snapshot's size is counted per raw byte, since it holds more than what changed."""
        size = statistics.median_low(self.size_bytes)  # arc_v3's varies
        speeds = {
            "encode_mb_s": round(pair.dense_bytes / 1e6 / statistics.median(self.encode_s), 1),
            "decode_mb_s": round(pair.dense_bytes / 1e6 / statistics.median(self.decode_s), 1),
        }
        what: Row = {"format": self.format, "threads": self.threads}
        if changed:
            return what | {"bytes_per_change": round(size / changed, 6)} | speeds
        return what | {"bytes_per_change": None, "bytes_per_raw_byte": round(size / pair.dense_bytes, 6)} | speeds


@dataclass
class Figures:
    """All that was measured of a pair; `notes` say what could not be."""

    pair: Pair
    deltas: list[Row]
    snapshots: list[Row] = field(default_factory=list)
    scan: Row | None = None
    notes: list[str] = field(default_factory=list)


def bench_pair(prefix: str, effort: Effort, *, peers: bool, snapshot: bool, scan: bool, tell: Tell) -> Figures:
    """Measure the pair `prefix`: our delta; with `peers` five others; with `snapshot` full snapshots, ours and zipnn's;
    with `scan` finding the changes alone.

    Raises:
        UsageError: the pair cannot be read, nothing changed in it, or a package that `peers` needs is not installed.
        DeltaError: the pair does not fit together.
        AnabranchError: a format is not exact.
    """
    pair = load_pair(prefix)
    busy = busy_elsewhere()
    others = [*simple_peers(), ArcV3(pair.layout)] if peers else []
    figures = Figures(pair, bench_deltas(pair, [Delta(pair), *others], effort, tell))
    if snapshot:
        snapshots: list[Format] = [Snapshot(pair)]
        try:
            snapshots.append(ZipNN(pair.layout))
        except UsageError as missing:  # it needs a compiler, so `make setup` may have gone on without it
            figures.notes.append(str(missing))
        figures.snapshots = _rows(pair, snapshots, effort, tell, changed=0)
    if scan:
        tell("scan")
        figures.scan = bench_scan(pair, effort)
    if (cores := busy()) > NOISY_CORES:
        figures.notes.append(
            f"other processes used {cores:.1f} of {all_cores()} cores meanwhile: repeat it on a quiet machine, "
            "above all for figures on all cores"
        )
    return figures


def busy_elsewhere() -> Callable[[], float]:
    """A function that says how many cores other processes have used on average since now; 0 where nothing tells."""

    def used() -> tuple[float, float, float]:
        try:
            # of all cores: user nice system idle iowait ...
            fields = Path("/proc/stat").read_text().split(None, 9)[1:8]
        except OSError:
            return 0.0, 0.0, time.monotonic()
        ticks = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic()

    start = used()

    def since() -> float:
        everybody, ours, wall = (now - then for now, then in zip(used(), start, strict=True))
        return max(0.0, everybody - ours) / max(wall, 1e-3)

    return since


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_counts() -> list[int]:
    return sorted({1, all_cores()})


def bench_deltas(pair: Pair, formats: Sequence[Format], effort: Effort, tell: Tell) -> list[Row]:
    """One row per format and thread count.

    Raises:
        UsageError: the pair does not differ, so that there is nothing to count bytes by.
        AnabranchError: a format is not exact.
    """
    changed = pair.changed_elements()
    if not changed:
        raise UsageError(f"nothing changed in {pair.name}: bytes per change are not defined")
    return _rows(pair, formats, effort, tell, changed)


def _rows(pair: Pair, formats: Sequence[Format], effort: Effort, tell: Tell, changed: int) -> list[Row]:
    measured = [m for threads in thread_counts() for m in measure(pair, formats, threads, effort, tell)]
    order = [codec.name for codec in formats]
    measured.sort(key=lambda m: (order.index(m.format), m.threads))
    return [m.row(pair, changed) for m in measured]


def measure(pair: Pair, formats: Sequence[Format], threads: int, effort: Effort, tell: Tell) -> list[Measured]:
    """Warm each format up and check it, then time them in turn, round after round.

    Raises:
        AnabranchError: a format did not give back the new state bit for bit.
    """
    state = {name: np.empty_like(bits) for name, bits in pair.base.items()}
    out = [Measured(codec.name, threads) for codec in formats]
    with on_cores(threads), Workers(threads) as workers:
        for codec in formats:
            tell(f"{codec.name}, {threads} threads: checking")
            _check(codec.name, _run(codec, pair, state, workers, None), pair)
        for number in range(effort.repeats):
            for codec, measured in zip(formats, out, strict=True):
                if number and sum(measured.encode_s) + sum(measured.decode_s) > effort.budget_s:
                    continue
                tell(f"{codec.name}, {threads} threads: run {number + 1} of {effort.repeats}")
                _run(codec, pair, state, workers, measured)
    return out


def _run(
    codec: Format, pair: Pair, state: dict[str, Bits], workers: Workers, measured: Measured | None
) -> Mapping[str, Bits]:
    def restore() -> dict[str, Bits]:
        for name, bits in pair.base.items():
            np.copyto(state[name], bits)
        return state

    encoded, encode_s = _timed(
        lambda: codec.prepare(pair.base, pair.new),
        lambda states: codec.encode(*states, workers),
        steady=measured is not None and measured.is_quick,
    )
    decoded, decode_s = _timed(
        restore,
        lambda base: codec.decode(base, encoded, workers),
        steady=measured is not None and measured.is_quick,
    )
    if measured is not None:
        measured.encode_s.append(encode_s)
        measured.decode_s.append(decode_s)
        measured.size_bytes.append(codec.size_bytes(encoded))
    return decoded


def _timed(prepare: Callable[[], A], work: Callable[[A], B], *, steady: bool) -> tuple[B, float]:
    """What `work` gives for what `prepare` gives, and the seconds it took.

    `steady`: it was repeated for a moment before. Linux starts threads that slept on the core of the one that wakes
    them and spreads them tens of milliseconds later: when a delta of 10 MB is long done, and one of 10 GB has hardly
    begun.
    """
    settle()
    end = time.monotonic() + _STEADY_S
    while steady and time.monotonic() < end:
        work(prepare())
    given = prepare()
    settle()
    started = time.perf_counter()
    result = work(given)
    return result, time.perf_counter() - started


def settle(deadline_s: float = 10.0) -> None:
    """Wait until no thread of this process computes. arc_v3 returns as soon as it has enough and lets candidates that
    are still being compressed run on, which would be taken from whoever is measured next."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(_SETTLE_S)
        if time.process_time() - before < _SETTLE_S / 4:
            return


def _check(name: str, decoded: Mapping[str, Bits], pair: Pair) -> None:
    for tensor, bits in pair.new.items():
        if tensor not in decoded or not np.array_equal(decoded[tensor], bits):
            raise AnabranchError(f"{name} did not give back the new weights of {pair.name}: tensor {tensor!r} differs")


def bench_scan(pair: Pair, effort: Effort) -> Row:
    """Finding the changes alone, against a copy of the same arrays, both on one core."""
    from anabranch.kernels.delta_scan import scan

    target = {name: np.empty_like(bits) for name, bits in pair.new.items()}
    scan_s: list[float] = []
    copy_s: list[float] = []
    with on_cores(1):
        for number in itertools.count():
            started = time.perf_counter()
            for name, bits in pair.new.items():
                scan(pair.base[name], bits)
            between = time.perf_counter()
            for name, bits in pair.new.items():
                np.copyto(target[name], bits)
            if number:  # the first compiles
                scan_s.append(between - started)
                copy_s.append(time.perf_counter() - between)
            if number >= effort.repeats or sum(scan_s) > effort.budget_s:
                break
    scan_median, copy_median = statistics.median(scan_s), statistics.median(copy_s)
    return {
        "format": "scan", "threads": 1, "bytes_per_change": None,
        "encode_mb_s": round(pair.dense_bytes / 1e6 / scan_median, 1), "decode_mb_s": None,
        "copyto_mb_s": round(pair.dense_bytes / 1e6 / copy_median, 1),
        "scan_to_copyto": round(copy_median / scan_median, 3),
    }  # fmt: skip


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep this thread, and threads that start meanwhile, to `count` of its cores (where the system can)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
