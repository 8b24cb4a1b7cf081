"""Which trajectories are meant, as people say it, and the SQL that finds them. Pure.

Invariant: what a user gives reaches SQL as a parameter or as a name out of a fixed list, never as text of the query. Held by
tests/unit/consumers/test_trajectory_filter.py.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Self

from anabranch.schemas.errors import UsageError
from anabranch.schemas.fates import LOGGED

SORTS = (
    "appended_ms", "reward", "tokens", "age", "step", "group_index", "advantage", "weight", "ratio_mean", "ratio_max",
    "kept_fraction", "loss_share", "version_min", "version_max", "started_ms", "finished_ms", "fate_time_ms",
)  # fmt: skip
NO_FATE = "pending"  # that which has none (yet)
_VERSION = re.compile(r"(?:e([0-9]{1,9})\.)?v?([0-9]{1,15})\Z")


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included; None: no bound."""

    low: float | None
    high: float | None

    @classmethod
    def parse(cls, text: str, *, what: str = "a number") -> Self:
        """`5`, `5..9`, `5..` or `..9`. Raises UsageError."""
        low, dots, high = text.partition("..")
        try:
            bounds = (_number(low), _number(high)) if dots else (_number(low),) * 2
        except ValueError:
            bounds = (None, None)
        if bounds == (None, None) or (None not in bounds and bounds[0] > bounds[1]):  # type: ignore[operator]
            raise UsageError(f"{text[:80]!r} is not {what}, nor a range such as 5..9, 5.. or ..9")
        return cls(*bounds)


@dataclass(frozen=True, slots=True)
class Versions:
    """Tokens of these policy versions; `epoch` None: of any epoch."""

    epoch: int | None
    range: Range

    @classmethod
    def parse(cls, text: str) -> Self:
        """`e1.v40`, `40`, `38..42`, `e1.v38..42`. Raises UsageError."""
        low, dots, high = text.partition("..")
        ends = [_VERSION.match(end) if end else None for end in ([low, high] if dots else [low])]
        epochs = {int(m[1]) for m in ends if m is not None and m[1] is not None}
        if any(m is None and end for m, end in zip(ends, [low, high] if dots else [low], strict=True)) or not any(ends):
            raise UsageError(f"{text[:80]!r} names no version: e1.v40, 40, or a range such as 38..42")
        if len(epochs) > 1:
            raise UsageError(f"{text[:80]!r} spans epochs: give versions of one, or without epoch")
        numbers = "..".join("" if m is None else m[2] for m in ends)
        return cls(epochs.pop() if epochs else None, Range.parse(numbers, what="a version"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Conditions that all hold. `fate`: trained, dropped (any cause), dropped:CAUSE, or pending; `text`: in prompt or completion,
    whatever its case."""

    step: Range | None = None
    version: Versions | None = None
    age: Range | None = None
    reward: Range | None = None
    tokens: Range | None = None
    group: Range | None = None
    region: str | None = None
    producer: str | None = None
    fate: str | None = None
    text: str | None = None

    def where(self) -> tuple[str, list[Any]]:
        """A condition over the columns of `trajectories`, "true" if all are meant, and its parameters."""
        terms: list[str] = []
        values: list[Any] = []

        def add(term: str, *parameters: Any) -> None:
            terms.append(term)
            values.extend(parameters)

        for column, bounds in (
            ("step", self.step), ("age", self.age), ("reward", self.reward), ("tokens", self.tokens), ("group_index", self.group),
        ):  # fmt: skip
            if bounds is not None:
                for sign, bound in ((">=", bounds.low), ("<=", bounds.high)):
                    if bound is not None:
                        add(f"{column} {sign} ?", bound)
        if self.version is not None:
            self._version(add)
        for column, name in (("region", self.region), ("producer", self.producer)):
            if name is not None:
                add(f"{column} = ?", name)
        if self.fate == NO_FATE:
            add("fate IS NULL")
        elif self.fate == "dropped":
            add("starts_with(fate, 'dropped:')")
        elif self.fate is not None:
            add("fate = ?", self.fate)
        if self.text is not None:
            add("(contains(lower(prompt_text), lower(?)) OR contains(lower(text), lower(?)))", self.text, self.text)
        return " AND ".join(terms) or "true", values

    def _version(self, add: Any) -> None:
        """A range of the narrow columns first, which spares reading the spans of most rows."""
        assert self.version is not None
        epoch, low, high = self.version.epoch, self.version.range.low, self.version.range.high
        inside = [f"s.version >= {int(low)}"] if low is not None else []
        inside += [f"s.version <= {int(high)}"] if high is not None else []
        if low is not None:
            add("version_max >= ?", int(low))
        if high is not None:
            add("version_min <= ?", int(high))
        if epoch is not None:
            add("epoch_min <= ? AND epoch >= ?", epoch, epoch)
            inside.append(f"s.epoch = {epoch}")
        add(f"len(list_filter(version_spans, lambda s: {' AND '.join(inside)})) > 0")


def order_by(sort: str) -> str:
    """ORDER BY of a name in `SORTS`; NAME:desc or -NAME: the highest first; ties in the order of appending. Raises UsageError."""
    name = sort.removeprefix("-").removesuffix(":desc")
    if name not in SORTS:
        near = difflib.get_close_matches(name, SORTS, n=1, cutoff=0.0)
        raise UsageError(
            f"{name[:80]!r} is nothing to sort by; did you mean {near[0]!r}? There are: {', '.join(SORTS)}"
        )
    down = "ASC" if sort == name else "DESC"
    # `appended_ms` is computed; the id's own order is that of appending up to ties inside a millisecond
    return f"{name} {down} NULLS LAST, appended_ms {down}, region, producer, seq, sample_index"


def check_fate(fate: str) -> str:
    """Raises UsageError: no group ends so."""
    known = (*LOGGED, "dropped", NO_FATE)
    if fate in known:
        return fate
    full = f"dropped:{fate}"
    if full in known:
        return full
    near = difflib.get_close_matches(fate, known, n=1, cutoff=0.0)
    raise UsageError(f"{fate[:80]!r} is no fate; did you mean {near[0]!r}? There are: {', '.join(known)}")


def _number(text: str) -> float | None:
    if not text.strip():
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
