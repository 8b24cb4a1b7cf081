"""Tokens for tests of corrections, losses and diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.kernels.tokens import Tokens


def tokens(
    ell: Tensor,
    behaviour: Tensor,
    advantages: Tensor | Sequence[float] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    lags: Sequence[int] | None = None,
    proximal: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tokens:
    """`advantages`: of each rollout, default 1; `lengths`: default one rollout of all tokens; `lags`: default 0."""
    n = ell.numel()
    of_rollouts = torch.tensor([n] if lengths is None else list(lengths))
    a = torch.ones(len(of_rollouts)) if advantages is None else torch.as_tensor(advantages)
    return Tokens(
        ell=ell,
        behaviour=behaviour,
        proximal=ell.detach() if proximal is None else proximal,
        advantages=a.to(ell.dtype).repeat_interleave(of_rollouts),
        lags=torch.zeros(n, dtype=torch.int64) if lags is None else torch.tensor(list(lags)),
        lengths=of_rollouts,
        selected=selected,
    )


def part(of: Tokens, start: int, stop: int) -> Tokens:
    """The tokens of rollouts `start` to `stop` of `of`."""
    ends = [0, *torch.cumsum(of.lengths, 0).tolist()]
    here = slice(ends[start], ends[stop])
    cut = {
        name: None if (whole := getattr(of, name)) is None else whole[here]
        for name in ("ell", "behaviour", "proximal", "advantages", "lags", "selected")
    }
    return replace(of, lengths=of.lengths[start:stop], **cut)
