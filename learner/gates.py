"""Bounds on a step's diagnostics, and what happens beyond them.

Invariant: `judge` is a function of diagnostics that are equal on all ranks, so all ranks decide alike. Held by
tests/unit/learner/test_gates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from anabranch.kernels.diagnostics import Diagnostics
from anabranch.schemas.config import GateSection

NOT_FINITE = "not finite"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A figure outside its bounds."""

    gate: str
    value: float
    bound: str
    action: Literal["warn", "skip", "stop"]

    def __str__(self) -> str:
        return f"{self.gate} = {self.value:.4g}, {self.bound}"


def judge(diagnostics: Diagnostics, gates: GateSection) -> list[Alarm]:
    """The gates that `diagnostics` (before truncation) do not pass. A figure that is no number passes none."""
    alarms: list[Alarm] = []

    def check(name: str, value: float | None, action: str, *, low: str = "", high: str = "") -> None:
        """`low`, `high`: the keys that bound it."""
        if action == "off" or value is None:
            return
        bound = ""
        if not math.isfinite(value):
            bound = NOT_FINITE
        elif low and value < getattr(gates, low):
            bound = f"below gates.{low} = {getattr(gates, low)}"
        elif high and value > getattr(gates, high):
            bound = f"above gates.{high} = {getattr(gates, high)}"
        if bound:
            alarms.append(Alarm(name, value, bound, action))  # type: ignore[arg-type]

    fresh, total = diagnostics.same_version, diagnostics.total
    if fresh is not None:
        check("kl_k3_same_version", fresh.kl_k3, gates.mismatch_action, high="mismatch_k3")
    if total is not None:
        check("ess_token", total.ess_token, gates.ess_action, low="ess")
        check("ess_sequence", total.ess_sequence, gates.ess_sequence_action, low="ess_sequence")
        check("ratio_mean", total.ratio_mean, gates.ratio_mean_action, low="ratio_mean_low", high="ratio_mean_high")
    return alarms


def non_finite(name: str, value: float, gates: GateSection) -> list[Alarm]:
    """An alarm if `value` is no finite number."""
    if math.isfinite(value):
        return []
    return [Alarm(name, value, NOT_FINITE, gates.non_finite_action)]


def strongest(alarms: Iterable[Alarm]) -> Literal["pass", "warn", "skip", "stop"]:
    order = ("stop", "skip", "warn")
    actions = {alarm.action for alarm in alarms}
    return next((action for action in order if action in actions), "pass")  # type: ignore[return-value]
