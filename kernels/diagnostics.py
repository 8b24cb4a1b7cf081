"""What a step tells about drift: ratios, divergences, effective sample size, before any truncation.

Invariant: the sums are additive, so the diagnostics of a batch do not depend on how it was split into microbatches
and ranks (to rounding). Held by tests/unit/kernels/test_diagnostics.py.

With d = ℓ − b per token and r = e^d: k1 = mean(−d), k3 = mean(r − 1 − d), both estimators of KL(behaviour ‖ policy)
(Schulman, "Approximating KL divergence", 2020); token ESS = (Σr)² / (N·Σr²) (Kong 1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.kernels.corrections import log_ratio
from anabranch.kernels.tokens import Tokens

# Places in the vector of sums.
_N, _R, _R2, _D, _K3, _N0, _K3_0, _KEPT, _MASS, _ENTROPY, _LOSS = range(11)


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Over the tokens that went through the forward pass; neutral values if there were none."""

    tokens: int
    ratio_mean: float
    ratio_max: float
    kl_k1: float
    kl_k3: float
    kl_k3_same_version: float | None  # over tokens of age 0: engine mismatch, not drift
    ess_token: float  # 0..1
    masked_fraction: float  # of these tokens, those that the trust region or the veto kept from the loss
    kept_mass: float  # weight of the kept tokens over the weight of all tokens of the batch
    entropy: float | None  # nats per token


class DiagnosticSums:
    """Accumulates sums over microbatches. `sums` float64 [11] is to be added over ranks, `ratio_max` float64 []
    to be maximised, before `finish`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(11, dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: Tokens, *, kept: Tensor, weights: Tensor, entropy: Tensor, loss: Tensor) -> None:
        """Count one microbatch of N tokens and R rollouts. `kept` bool [N]; `weights` float [R]; `entropy` float [N], nats;
        `loss` scalar."""
        d = log_ratio(tokens.ell, tokens.behaviour).double()
        r = d.exp()
        k3 = r - 1 - d
        fresh = tokens.lags == 0
        mass = (tokens.spread(weights) * kept).double().sum()
        parts = [
            torch.tensor(float(d.numel())), r.sum(), r.square().sum(), d.sum(), k3.sum(), fresh.sum(), k3[fresh].sum(),
            kept.sum(), mass, entropy.double().sum(), loss.detach(),
        ]  # fmt: skip
        self.sums += torch.stack([p.to(self.sums) for p in parts])
        self.ratio_max = torch.maximum(self.ratio_max, r.max())

    def finish(self, *, total_mass: float) -> tuple[Diagnostics, float]:
        """The diagnostics and the loss, once the sums cover all microbatches and ranks. `total_mass`: Σ weight over
        every token of the batch."""
        s = self.sums.tolist()
        n = s[_N]
        loss = s[_LOSS]
        if n == 0:
            return Diagnostics(0, 1.0, 1.0, 0.0, 0.0, None, 1.0, 0.0, 0.0, None), loss
        return (
            Diagnostics(
                tokens=int(n),
                ratio_mean=s[_R] / n,
                ratio_max=float(self.ratio_max),
                kl_k1=-s[_D] / n,
                kl_k3=s[_K3] / n,
                kl_k3_same_version=s[_K3_0] / s[_N0] if s[_N0] else None,
                ess_token=s[_R] ** 2 / (n * s[_R2]),
                masked_fraction=1 - s[_KEPT] / n,
                kept_mass=s[_MASS] / total_mass,
                entropy=s[_ENTROPY] / n,
            ),
            loss,
        )
