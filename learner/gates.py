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

    def check(gate: str, value: float, *, low: float, high: float, action: str, key: str) -> None:
        if action == "off" or low <= value <= high:
            return
        bound = f"below gates.{key}{'_low' if high < math.inf else ''} = {low}" if value < low else ""
        bound = bound or f"above gates.{key}{'_high' if low > 0 else ''} = {high}"
        alarms.append(Alarm(gate, value, bound, action))  # type: ignore[arg-type]

    fresh, total = diagnostics.same_version, diagnostics.total
    if fresh is not None:
        check("kl_k3_same_version", fresh.kl_k3, low=-math.inf, high=gates.mismatch_k3, action=gates.mismatch_action,
              key="mismatch_k3")  # fmt: skip
    if total is not None:
        check("ess_token", total.ess_token, low=gates.ess, high=math.inf, action=gates.ess_action, key="ess")
        check("ratio_mean", total.ratio_mean, low=gates.ratio_mean_low, high=gates.ratio_mean_high,
              action=gates.ratio_mean_action, key="ratio_mean")  # fmt: skip
    return alarms


def non_finite(name: str, value: float, gates: GateSection) -> list[Alarm]:
    """An alarm if `value` is no finite number."""
    if math.isfinite(value):
        return []
    return [Alarm(name, value, "not finite", gates.non_finite_action)]


def strongest(alarms: Iterable[Alarm]) -> Literal["pass", "warn", "skip", "stop"]:
    order = ("stop", "skip", "warn")
    actions = {alarm.action for alarm in alarms}
    return next((action for action in order if action in actions), "pass")  # type: ignore[return-value]
