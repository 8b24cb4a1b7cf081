"""What a step tells about drift: ratios, divergences, effective sample size, before any truncation.

Invariant: the sums are additive, so the diagnostics of a batch do not depend on how it was split into microbatches
and ranks (to rounding). Held by tests/unit/kernels/test_diagnostics.py.

With d = ℓ − b per token (clamped to ±20) and r = e^d: k1 = mean(−d), k2 = mean(d²/2), k3 = mean(r − 1 − d), three estimators of
KL(behaviour ‖ policy) (Schulman, "Approximating KL divergence", 2020); token ESS = (Σr)² / (N·Σr²) (Kong 1992), and the same over
trajectories with w = exp(Σd).

Every sum is kept per *cell*: a bucket of lags and the sign of the advantage. A trajectory counts in the cell of its last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from anabranch.kernels.corrections import log_ratio
from anabranch.kernels.tokens import Tokens

K = TypeVar("K")
LAG_STARTS = (0, 1, 2, 4, 8, 16, 32)  # the first lag of each bucket; the last one has no end
SIGNS = ("positive", "negative")  # A > 0, A ≤ 0
CELLS = len(LAG_STARTS) * len(SIGNS)

# Places in a cell's vector of sums; the maxima are a tensor of their own.
_N, _R, _R2, _D, _ABS, _K2, _K3, _KEPT, _MASS, _ENTROPY, _SEQ, _W, _W2 = range(13)
_R_MAX, _ABS_MAX = range(2)

# The 99th percentile comes from a histogram over d whose bins are 5 % wide far from 0 and 5e-6 near it.
_BINS, _BIN_SCALE, _BIN_WIDTH = 512, 1e-4, 0.0505


@dataclass(frozen=True, slots=True)
class Drift:
    """Of some tokens, at least one."""

    tokens: int
    ratio_mean: float
    ratio_max: float
    ratio_p99: float  # 99 % of the tokens have at most this ratio (up to 5 % of d above the true percentile)
    log_ratio_abs_mean: float
    log_ratio_abs_max: float
    kl_k1: float
    kl_k2: float
    kl_k3: float
    ess_token: float  # 0..1
    ess_sequence: float | None  # 0..1; None if no trajectory ends among them
    masked_fraction: float  # tokens that the trust region or the veto kept from the loss
    kept_mass: float  # weight of the kept tokens over the weight of all tokens of the batch
    entropy: float  # nats per token


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """`total` over the tokens that went through the forward pass (None if there were none); `cells` by (first lag of the
    bucket, sign of the advantage), without empty ones."""

    total: Drift | None
    cells: dict[tuple[int, str], Drift]
    by_lag: dict[int, Drift]
    by_sign: dict[str, Drift]

    @property
    def same_version(self) -> Drift | None:
        """Over tokens of lag 0, where engine and learner hold the same weights: what differs there is no drift."""
        return self.by_lag.get(0)


class DiagnosticSums:
    """Accumulates over microbatches. `sums` is to be added over ranks, `maxima` to be maximised, before `finish`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(CELLS * (13 + _BINS) + 1, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(CELLS, 2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: Tokens, *, kept: Tensor, weights: Tensor, entropy: Tensor, loss: Tensor) -> None:
        """Count one microbatch of N tokens and R rollouts. `kept` bool [N]; `weights` float [R]; `entropy` float [N], nats;
        `loss` scalar."""
        d = log_ratio(tokens.ell, tokens.behaviour).double()
        r = d.exp()
        starts = torch.tensor(LAG_STARTS, device=d.device)
        bucket = torch.searchsorted(starts, tokens.lags, right=True) - 1
        cell = bucket.clamp(min=0) * len(SIGNS) + (tokens.advantages <= 0)
        mass = (tokens.spread(weights) * kept).double()
        ends = tokens.lengths.cumsum(0) - 1
        w = torch.zeros_like(d)
        w[ends] = tokens.per_rollout(d).clamp(-20.0, 20.0).exp()
        one = torch.ones_like(d)
        ends_here = torch.zeros_like(d).index_fill_(0, ends, 1.0)
        parts = torch.stack(
            [one, r, r.square(), d, d.abs(), d.square() / 2, r - 1 - d, kept.double(), mass, entropy.double(), ends_here, w,
             w.square()],
            dim=1,
        )  # fmt: skip
        self._cell_sums().index_add_(0, cell, parts)
        self._histogram().index_add_(0, cell * _BINS + _bin(d), one)
        self.sums[-1] += loss.detach().double()
        for place, values in ((_R_MAX, r), (_ABS_MAX, d.abs())):
            self.maxima[:, place].scatter_reduce_(0, cell, values, "amax")

    def finish(self, *, total_mass: float) -> tuple[Diagnostics, float]:
        """The diagnostics and the loss, once the sums cover all microbatches and ranks. `total_mass`: Σ weight over
        every token of the batch."""
        cells = {(start, sign): [2 * b + s] for b, start in enumerate(LAG_STARTS) for s, sign in enumerate(SIGNS)}
        return (
            Diagnostics(
                total=self._drift(range(CELLS), total_mass),
                cells=self._split(cells, total_mass),
                by_lag=self._split({start: [2 * b, 2 * b + 1] for b, start in enumerate(LAG_STARTS)}, total_mass),
                by_sign=self._split({sign: range(s, CELLS, 2) for s, sign in enumerate(SIGNS)}, total_mass),
            ),
            float(self.sums[-1]),
        )

    def _split(self, cells: Mapping[K, Iterable[int]], total_mass: float) -> dict[K, Drift]:
        found = {key: self._drift(places, total_mass) for key, places in cells.items()}
        return {key: drift for key, drift in found.items() if drift is not None}

    def _drift(self, cells: Iterable[int], total_mass: float) -> Drift | None:
        rows = list(cells)
        s = self._cell_sums()[rows].sum(0).tolist()
        n = s[_N]
        if n == 0:
            return None
        counts = self._histogram().view(CELLS, _BINS)[rows].sum(0).cumsum(0)
        p99 = _bin_top(int(torch.searchsorted(counts, math.ceil(0.99 * n))))
        maxima = self.maxima[rows].amax(0).tolist()
        return Drift(
            tokens=int(n),
            ratio_mean=s[_R] / n,
            ratio_max=maxima[_R_MAX],
            ratio_p99=min(math.exp(p99), maxima[_R_MAX]),
            log_ratio_abs_mean=s[_ABS] / n,
            log_ratio_abs_max=maxima[_ABS_MAX],
            kl_k1=-s[_D] / n,
            kl_k2=s[_K2] / n,
            kl_k3=s[_K3] / n,
            ess_token=s[_R] ** 2 / (n * s[_R2]),
            ess_sequence=s[_W] ** 2 / (s[_SEQ] * s[_W2]) if s[_SEQ] else None,
            masked_fraction=1 - s[_KEPT] / n,
            kept_mass=s[_MASS] / total_mass,
            entropy=s[_ENTROPY] / n,
        )

    def _cell_sums(self) -> Tensor:
        return self.sums[: CELLS * 13].view(CELLS, 13)

    def _histogram(self) -> Tensor:
        return self.sums[CELLS * 13 : -1]


def _bin(d: Tensor) -> Tensor:
    """Bin of each log-ratio: equal widths in asinh(d / scale). int64."""
    place = torch.asinh(d.nan_to_num(0.0) / _BIN_SCALE) / _BIN_WIDTH + _BINS / 2
    return place.floor().clamp(0, _BINS - 1).long()


def _bin_top(k: int) -> float:
    return math.sinh((min(k, _BINS - 1) + 1 - _BINS / 2) * _BIN_WIDTH) * _BIN_SCALE
