"""Every objective in every form, and random batches on which all of their branches occur."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from anabranch.kernels.objectives import needs_selection, selection, squared_drift
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.config.correction import Objective
from tests.unit.kernels.token_samples import tokens

NAMES = get_args(Objective)
_NARROWING = {"narrow_with_age": True, "narrow_rate": 0.5, "narrow_from": 1}
# Name -> the keys of a configuration without penalty.
KEYS: dict[str, dict[str, object]] = {
    **{name: {"objective": name} for name in NAMES},
    "gspo": {
        "objective": "gspo",
        "clip_low": 0.1,
        "clip_high": 0.15,
    },  # at its default nearly every trajectory is clipped
    "gspo, narrowing": {"objective": "gspo", "clip_low": 0.3, "clip_high": 0.4, **_NARROWING},
    "ppo, narrowing": {"objective": "ppo", **_NARROWING},
    "decoupled, narrowing": {"objective": "decoupled", **_NARROWING},
    "a3po, narrowing": {"objective": "a3po", **_NARROWING},
    "opsm, narrowing": {"objective": "opsm", **_NARROWING},
    "dppo_tv, narrowing": {"objective": "dppo_tv", **_NARROWING},
    "dppo_kl, narrowing": {"objective": "dppo_kl", **_NARROWING},
    "m2po, narrowing": {"objective": "m2po", **_NARROWING},
    "tis of a sequence": {"objective": "tis", "ratio_level": "sequence"},
    "topr of a sequence": {"objective": "topr", "ratio_level": "sequence"},
    "seq_mis, product": {"objective": "seq_mis", "sequence_ratio": "product"},
}
CASES = {name: CorrectionSection.model_validate({"penalty": 0.0, **keys}) for name, keys in KEYS.items()}


def random_batch(config: CorrectionSection, seed: int = 0, *, rollouts: int = 8, spread: float = 0.5) -> Tokens:
    """Float64 tokens with gradient; `spread`: standard deviation of ℓ − p and of p − b. Carries the selection, if there is one."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rollouts,), generator=g)
    n = int(lengths.sum())

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, dtype=torch.float64, generator=g)

    behaviour = -0.05 - 3 * torch.rand(n, dtype=torch.float64, generator=g)
    proximal = (behaviour + spread * normal(n)).clamp(max=-0.01)
    ell = (proximal + spread * normal(n)).clamp(max=-0.005)
    of = tokens(
        ell.requires_grad_(), behaviour, normal(rollouts), lengths=lengths.tolist(),
        lags=torch.randint(0, 9, (n,), generator=g).tolist(), proximal=proximal,
    )  # fmt: skip
    return with_selection(of, config)


def with_selection(of: Tokens, config: CorrectionSection) -> Tokens:
    """`of`, taken for a whole batch."""
    return replace(of, selected=selection(squared_drift(of, config), config)) if needs_selection(config) else of
