"""Made-up results of a lag study."""

from __future__ import annotations

from typing import Any

STEPS = 20


def make_row(
    correction: str, lag: int, seed: int = 0, *, end: float = 0.9, lr: float = 3e-4, **changes: Any
) -> dict[str, Any]:
    """A run that rises from 0.4 to `end` over the first half and stays there."""
    heldout = [[version, 0.4 + (end - 0.4) * min(1.0, version / 10)] for version in range(0, STEPS + 1, 5)]
    return {
        "correction": correction, "lag": lag, "lr": lr, "seed": seed, "steps": STEPS, "settings": "s",
        "reward": [0.4] * 10 + [end] * 10, "heldout": heldout, "greedy": 0.99, "ess": [None, *[1.0 - lag / 100] * 19],
        "masked": [lag / 1000] * 20, "kl": [0.1] * 20, "entropy": [0.5] * 20, "grad_norm": [1.0] * 20,
        "alarms": {"ess_token": lag} if lag else {}, "stopped": "", "seconds": 3.0,
    } | changes  # fmt: skip
