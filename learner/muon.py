"""Muon: momentum whose update is orthogonalised, for the weight matrices of a small model.

Invariant: the update of a matrix has all singular values near 1 before scaling, so every direction of the gradient's
row and column space moves alike. Held by tests/unit/learner/test_tiny_model.py.

Source: Jordan et al., "Muon: an optimizer for hidden layers", 2024, with the quintic Newton–Schulz coefficients given
there, and the scale 0.2·sqrt(max(rows, columns)) of Liu et al., arXiv 2502.16982, section 2.2, which makes the size of an
update that of AdamW. `torch.optim.Muon` does the same in bf16, which CPUs without bf16 instructions run ten times
slower; here it is float32. Matrices of equal shape are orthogonalised as one batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon:
    """Args: `parameters` matrices [rows, columns]; `lr` relative to AdamW's scale; `momentum` of Nesterov's form."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        self.lr, self._momentum = lr, momentum
        self._by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._by_shape.setdefault(parameter.shape, []).append(parameter)
        self._velocity = {shape: torch.zeros(len(same), *shape) for shape, same in self._by_shape.items()}

    @torch.no_grad()
    def step(self) -> None:
        for shape, same in self._by_shape.items():
            gradient = torch.stack([p.grad for p in same if p.grad is not None])
            velocity = self._velocity[shape].lerp_(gradient, 1 - self._momentum)
            update = orthogonalise(gradient.lerp(velocity, self._momentum))
            for parameter, change in zip(same, update, strict=True):
                parameter.add_(change, alpha=-self.lr * 0.2 * max(shape) ** 0.5)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, rows, columns] → the same shape, singular values moved to about 1 (0.7 to 1.2), singular vectors kept."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if matrices.shape[1] <= matrices.shape[2] else wide.mT
