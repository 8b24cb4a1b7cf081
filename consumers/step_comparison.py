"""Two records of one step, bit against bit. Pure.

Invariant: `compare` is empty exactly if every figure that both records hold has the same bits (NaN of the same bits are equal); else it
names what differs in the order in which a step computes, so the first line is nearest to the cause. Held by
tests/unit/consumers/test_step_comparison.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.step_record import StepFacts
from anabranch.schemas.trajectory_id import TrajectoryId

# In the order in which a step computes them.
ROW_COLUMNS = ("tokens", "age_max", "update", "advantage", "weight")
TOKEN_COLUMNS = ("proximal", "logprob", "entropy", "kept", "factor")
RESULT_COLUMNS = ("ratio_mean", "ratio_max", "kept_fraction", "loss_share", "applied")


@dataclass(frozen=True, slots=True)
class Difference:
    """`count`: of how many rows or tokens; `where`, `recorded`, `replayed`: of the first. `most`, `most_ulps`: the largest absolute one and in
    units of the last place, None where that means nothing."""

    what: str
    where: str
    recorded: str
    replayed: str
    count: int = 1
    most: float | None = None
    most_ulps: int | None = None


def compare(recorded: tuple[StepFacts, pa.Table], replayed: tuple[StepFacts, pa.Table]) -> list[Difference]:
    """Args: facts, and the rollouts in the order of the batch (`ROLLOUT_SCHEMA`)."""
    (facts, rows), (facts_again, rows_again) = recorded, replayed
    if rows.num_rows != rows_again.num_rows:
        return [Difference("rollouts", "the batch", str(rows.num_rows), str(rows_again.num_rows))]
    names = _names(rows)
    found = [*_scalars(facts, facts_again, ("now", "lr", "zero_variance"))]
    found += _columns(rows, rows_again, ROW_COLUMNS, names.__getitem__)
    if facts.tokens and facts_again.tokens:
        found += _columns(rows, rows_again, TOKEN_COLUMNS, names.__getitem__)
    found += _columns(rows, rows_again, RESULT_COLUMNS, names.__getitem__)
    found += _updates(facts, facts_again)
    return [*found, *_scalars(facts, facts_again, ("skipped",))]


def surroundings(facts: StepFacts, here: StepFacts) -> list[str]:
    """What of machine and programs is not as it was: bits may differ for it."""
    found = [
        f"{name}: {getattr(facts, name)} then, {getattr(here, name)} now"
        for name in ("cpu", "gpu", "device", "threads", "dtype", "compute_dtype", "zero_stage", "world_size")
        if getattr(facts, name) != getattr(here, name)
    ]
    for name in sorted({*facts.packages, *here.packages}):
        then, now = facts.packages.get(name), here.packages.get(name)
        if then != now:
            found.append(f"{name} {then} then, {now} now")
    return found


def _names(rows: pa.Table) -> list[str]:
    keys = ("region", "producer", "seq", "sample_index")
    return [str(TrajectoryId(*key)) for key in zip(*(rows[name].to_pylist() for name in keys), strict=True)]


def _scalars(facts: StepFacts, again: StepFacts, names: Sequence[str]) -> list[Difference]:
    pairs = [(name, getattr(facts, name), getattr(again, name)) for name in names]
    return [Difference(name, "the step", str(a), str(b)) for name, a, b in pairs if a != b]


def _updates(facts: StepFacts, again: StepFacts) -> list[Difference]:
    found = []
    if len(facts.updates) != len(again.updates):
        found.append(Difference("updates", "the step", str(len(facts.updates)), str(len(again.updates))))
    for at, (a, b) in enumerate(zip(facts.updates, again.updates, strict=False)):
        for name in ("loss", "grad_norm"):
            if getattr(a, f"{name}_bits") != getattr(b, f"{name}_bits"):
                x, y = float.fromhex(getattr(a, f"{name}_bits")), float.fromhex(getattr(b, f"{name}_bits"))
                ulps = _ulps(np.array([x]), np.array([y]))
                found.append(Difference(name, f"update {at}", repr(x), repr(y), 1, abs(x - y), int(ulps[0])))
        if a.applied != b.applied:
            found.append(Difference("applied", f"update {at}", str(a.applied), str(b.applied)))
    return found


def _columns(a: pa.Table, b: pa.Table, names: Sequence[str], where: Callable[[int], str]) -> list[Difference]:
    found = []
    for name in names:
        one, other = a[name].combine_chunks(), b[name].combine_chunks()
        difference = _lists(name, one, other, where) if pa.types.is_list(one.type) else _values(name, one, other, where)
        if difference is not None:
            found.append(difference)
    return found


def _values(name: str, a: pa.Array, b: pa.Array, where: Callable[[int], str]) -> Difference | None:
    apart, most, ulps = _apart(a, b)
    if not apart.any():
        return None
    at = int(np.flatnonzero(apart)[0])
    return Difference(name, where(at), str(a[at].as_py()), str(b[at].as_py()), int(apart.sum()), most, ulps)


def _lists(name: str, a: pa.Array, b: pa.Array, where: Callable[[int], str]) -> Difference | None:
    """Lists of equal length are compared token by token; one that is null, or of another length, differs as a whole."""
    lengths, lengths_again = (_lengths(column) for column in (a, b))
    if not np.array_equal(lengths, lengths_again):
        at = int(np.flatnonzero(lengths != lengths_again)[0])
        told = [("null" if n < 0 else f"{n} tokens") for n in (lengths[at], lengths_again[at])]
        return Difference(name, where(at), told[0], told[1], int((lengths != lengths_again).sum()))
    one, other = a.flatten(), b.flatten()
    apart, most, ulps = _apart(one, other)
    if not apart.any():
        return None
    first = int(np.flatnonzero(apart)[0])
    ends = np.cumsum(np.maximum(lengths, 0))
    row = int(np.searchsorted(ends, first, side="right"))
    token = first - int(ends[row] - lengths[row])
    return Difference(
        name, f"{where(row)}, token {token}", str(one[first].as_py()), str(other[first].as_py()), int(apart.sum()), most, ulps
    )  # fmt: skip


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """Of each list, −1 for null."""
    return np.array([-1 if value is None else value for value in column.value_lengths().to_pylist()], np.int64)


def _apart(a: pa.Array, b: pa.Array) -> tuple[NDArray[np.bool_], float | None, int | None]:
    """Where two arrays have other bits, or one is null; how far at most."""
    null_a, null_b = (np.array(column.is_null()) for column in (a, b))
    x, y = (_plain(column) for column in (a, b))
    if not np.issubdtype(x.dtype, np.floating):
        return (null_a != null_b) | (~null_a & (x != y)), None, None
    bits = np.int64 if x.itemsize == 8 else np.int32
    apart = (null_a != null_b) | (~null_a & ~null_b & (x.view(bits) != y.view(bits)))
    both = apart & ~null_a & ~null_b
    if not both.any():
        return apart, None, None
    with np.errstate(invalid="ignore"):
        most = float(np.nanmax(np.abs(x[both].astype(np.float64) - y[both]), initial=0.0))
    return apart, most, int(_ulps(x[both], y[both]).max())


def _plain(column: pa.Array) -> NDArray[Any]:
    filled = column.fill_null(False) if pa.types.is_boolean(column.type) else column.fill_null(0)
    return np.ascontiguousarray(filled.to_numpy(zero_copy_only=False))


def _ulps(x: NDArray[np.floating[Any]], y: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Representable numbers between two of one dtype, NaN counted as the last ones."""
    bits = np.int64 if x.itemsize == 8 else np.int32

    def place(values: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
        raw = values.view(bits).astype(np.int64)
        return np.where(raw < 0, np.iinfo(bits).min - raw, raw).astype(np.int64)

    with np.errstate(over="ignore"):
        return np.abs(place(x) - place(y))
