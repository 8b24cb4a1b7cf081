"""How bytes per change and speed go with density, model size and dtype, on synthetic steps.

Invariant: a synthetic step follows the update law that real steps were measured to follow: an element changes by
⌊|update| / ulp + uniform⌋ places in the order of values, so P(change) = min(1, |update| / ulp(old)); weights are normal,
updates are a learning rate times normal numbers, as Adam's are about. Every decoded state is compared with the new one.
Held by tests/unit/deploy/test_codec_sweep.py.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from anabranch.kernels.delta_codec import apply_changes, decode, encode_delta
from anabranch.kernels.delta_dtypes import CLASSES, FORMS, BitForm, Bits, from_ordered, to_ordered
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import AnabranchError, UsageError
from anabranch.schemas.layout import Layout

DENSITIES = (0.0005, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5)
ELEMENTS = (10**6, 10**7, 10**8, 10**9)
DTYPES = ("bf16", "f16", "f32", "f8_e4m3", "f8_e5m2")
DEFAULT_ELEMENTS, DEFAULT_DENSITY = 2**24, 0.01
TENSOR_ELEMENTS = 2**22
POOL_ELEMENTS = 2**24  # larger states repeat these
# fp8 weights come with a scale that fills their range; others have std 0.02
SCALE = {"f8_e4m3": 1000.0, "f8_e5m2": 1000.0}


@dataclass(frozen=True, slots=True)
class Row:
    sweep: str
    dtype: str
    elements: int
    density: float
    threads: int
    bytes_per_change: float
    bound: float  # bytes per change of an ideal coder of positions given the old exponent, and of steps given it
    encode_mb_s: float
    decode_mb_s: float


def sweep(what: str, *, repeats: int = 3, max_elements: int = ELEMENTS[-1]) -> Iterator[Row]:
    """Rows of one sweep, as they are measured: "density", "size" or "dtype". `max_elements` leaves larger states out.

    Raises:
        UsageError: `max_elements` leaves nothing, or states so small that nothing changes.
        AnabranchError: a step was not decoded exactly.
    """
    if what == "size" and max_elements < ELEMENTS[0]:
        raise UsageError(f"--max-elements {max_elements} leaves nothing of the sweep, which begins at {ELEMENTS[0]:,}")
    if what == "density":
        for density in DENSITIES:
            yield _measure(what, "bf16", min(DEFAULT_ELEMENTS, max_elements), density, repeats)
    elif what == "size":
        for elements in ELEMENTS:
            if elements <= max_elements:
                yield _measure(what, "bf16", elements, DEFAULT_DENSITY, repeats)
    else:
        for dtype in DTYPES:
            yield _measure(what, dtype, min(DEFAULT_ELEMENTS, max_elements), DEFAULT_DENSITY, repeats)


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("dtype", "elements", "changed", "bytes / change", "bound", "encode MB/s", "decode MB/s"):
        drawn.add_column(name, justify="left" if name == "dtype" else "right")
    for row in rows:
        drawn.add_row(
            row.dtype, f"{row.elements:,}", f"{row.density:.2%}", f"{row.bytes_per_change:.3f}",
            f"{row.bound:.3f}", f"{row.encode_mb_s:,.0f}", f"{row.decode_mb_s:,.0f}",
        )  # fmt: skip
    return drawn


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bytes per change, and speeds, over what the sweep varies."""
    from matplotlib.figure import Figure

    what = rows[0].sweep
    x: list[Any] = [{"density": r.density, "size": r.elements, "dtype": r.dtype}[what] for r in rows]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    size, speed = figure.subplots(1, 2)
    size.plot(x, [r.bytes_per_change for r in rows], "o-", label="class-golomb/1")
    size.plot(x, [r.bound for r in rows], "k:", label="entropy given the old exponent")
    size.legend()
    size.set_ylabel("bytes per changed element")
    size.set_ylim(bottom=0)
    speed.plot(x, [r.encode_mb_s for r in rows], "o-", label="encode")
    speed.plot(x, [r.decode_mb_s for r in rows], "o-", label="decode")
    speed.set_ylabel(f"MB/s of dense weights, {rows[0].threads} threads")
    speed.set_ylim(bottom=0)
    speed.legend()
    for axes in (size, speed):
        if what != "dtype":
            axes.set_xscale("log")
        axes.set_xlabel({"density": "share of elements that change", "size": "elements", "dtype": "dtype"}[what])
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _measure(what: str, dtype: str, elements: int, density: float, repeats: int) -> Row:
    layout, base, new = synthetic_step(dtype, elements, density)
    threads = len(os.sched_getaffinity(0))
    changed = sum(int(np.count_nonzero(base[name] != new[name])) for name in base)
    if not changed:
        raise UsageError(f"--max-elements {elements} is too few: nothing of them changes at a density of {density:.2%}")
    with Workers(threads) as workers:
        encoded, encode_s = _timed(repeats, lambda: encode_delta(layout, base, new, workers))
        changes, decode_s = _timed(repeats, lambda: decode(layout, encoded.chunks, base, workers))
    names = list(base)
    old = base[names[0]].copy()
    apply_changes(base, changes)
    if any(not np.array_equal(base[name], new[name]) for name in base):
        raise AnabranchError(f"a synthetic {dtype} step of density {density} was not decoded exactly")
    megabytes = layout.payload_bytes / 1e6
    return Row(
        what, dtype, elements, changed / elements, threads, sum(map(len, encoded.chunks)) / changed,
        entropy_bound(old, new[names[0]], FORMS[dtype]), megabytes / encode_s, megabytes / decode_s,
    )  # fmt: skip


def _timed(repeats: int, call: Callable[[], Any]) -> tuple[Any, float]:
    """The last result and the median time, after a first call that compiles."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, statistics.median(seconds)


def synthetic_step(
    dtype: str, elements: int, density: float, *, seed: int = 0
) -> tuple[Layout, dict[str, Bits], dict[str, Bits]]:
    """(layout, base, new): `elements` of `dtype` in tensors of at most TENSOR_ELEMENTS, of which about `density` change."""
    form = FORMS[dtype]
    rng = np.random.default_rng(seed)
    size = min(elements, POOL_ELEMENTS)
    weights = rng.normal(0, 0.02 * SCALE.get(dtype, 1.0), size)
    old = _bits(weights, dtype)
    noise = rng.normal(size=size)
    lr = _lr_for(density, old[:100_000], noise[:100_000], form)
    places = np.floor(np.abs(lr * noise) / _ulp(old, form) + rng.random(size)).astype(np.int64)
    ordered = to_ordered(old, form)
    moved = (ordered.astype(np.int64) + np.sign(noise).astype(np.int64) * places).astype(form.uint)
    new = from_ordered(moved, form)
    names = [f"layers.{i}.weight" for i in range(-(-elements // TENSOR_ELEMENTS))]
    sizes = [min(TENSOR_ELEMENTS, elements - i * TENSOR_ELEMENTS) for i in range(len(names))]
    starts = [i * TENSOR_ELEMENTS % POOL_ELEMENTS for i in range(len(names))]
    layout = Layout.build((name, dtype, (n,)) for name, n in zip(names, sizes, strict=True))
    pieces = list(zip(names, starts, sizes, strict=True))
    return (
        layout,
        {name: old[a : a + n].copy() for name, a, n in pieces},
        {name: new[a : a + n].copy() for name, a, n in pieces},
    )


def entropy_bound(old: Bits, new: Bits, form: BitForm) -> float:
    """Bytes per change of an ideal coder that knows of each element only its old exponent: for every class, the entropy of
    which elements change, at one probability, and that of the steps. `old`, `new` [n]."""
    classes = (old >> form.uint(form.exponent_shift)) & form.uint(form.exponent_mask)
    changed = old != new
    members = np.bincount(classes, minlength=CLASSES)
    hits = np.bincount(classes[changed], minlength=CLASSES)
    steps = to_ordered(new[changed], form) - to_ordered(old[changed], form)
    bits = _split_bits(hits, members - hits)
    for c in np.flatnonzero(hits):
        _, counts = np.unique(steps[classes[changed] == c], return_counts=True)
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8 / int(changed.sum())


def _split_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Entropy in bits of which of a + b are the a, summed over pairs."""
    total = np.maximum(a + b, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(n > 0, n * np.log2(n / total), 0.0) for n in (a, b)]
    return -float(sum(t.sum() for t in terms))


def _bits(weights: np.ndarray[Any, Any], dtype: str) -> Bits:
    """The patterns of `weights` in `dtype`: truncated to bf16, rounded otherwise."""
    if dtype == "f32":
        return weights.astype(np.float32).view(np.uint32)
    if dtype == "bf16":
        return (weights.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype == "f16":
        return weights.astype(np.float16).view(np.uint16)
    import torch

    to = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}[dtype]
    return np.asarray(torch.from_numpy(weights.astype(np.float32)).to(to).view(torch.uint8).numpy())


def _ulp(bits: Bits, form: BitForm) -> np.ndarray[Any, Any]:
    """Spacing of values at `bits`, float64."""
    exponent = ((bits >> form.uint(form.exponent_shift)) & form.uint(form.exponent_mask)).astype(np.int64)
    bias = form.exponent_mask >> 1
    return np.ldexp(1.0, np.maximum(exponent, 1) - bias - form.exponent_shift)


def _lr_for(density: float, bits: Bits, noise: np.ndarray[Any, Any], form: BitForm) -> float:
    """The learning rate at which about `density` of elements like these change."""
    ulp = _ulp(bits, form)
    low, high = 1e-12, 1e3
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        changed = float(np.minimum(1.0, np.abs(middle * noise) / ulp).mean())
        low, high = (middle, high) if changed < density else (low, middle)
    return low
