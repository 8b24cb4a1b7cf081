"""What a cell of the lag study measures.

Invariant: plain data without torch, so that results are read and drawn without it. Held by tests/unit/deploy/test_lag_cell.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measuring:
    """How the policy itself is measured, whatever it is trained on: on held-out prompts, at temperature 1."""

    every: int = 5  # steps between measurements; the first and the last version are always measured
    samples: int = 2  # of each held-out prompt
    final_samples: int = 8  # of the last version


@dataclass(frozen=True, slots=True)
class CellResult:
    """`reward`, `ess`, `masked`, `kl`, `entropy`, `grad_norm`: one number per step. `heldout`: (version, mean reward)."""

    reward: list[float]  # of the batch: of the policy `lag` versions ago
    heldout: list[tuple[int, float]]
    greedy: float | None  # of the last version, likeliest tokens
    ess: list[float | None]  # token ESS; None where no group had a gradient
    masked: list[float | None]
    kl: list[float | None]  # k3, behaviour to policy
    entropy: list[float | None]
    grad_norm: list[float]
    alarms: dict[str, int]  # gate -> steps that did not pass it
    stopped: str  # why it ended early: a loss or gradient that is no number
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
