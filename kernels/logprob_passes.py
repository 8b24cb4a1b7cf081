"""Log-probs, entropies and gradients in two passes over tiles of the logits: what kernels/logprobs.py does on any device.

Invariant: a tile of logits is in memory at a time (two where entropies are asked for), and what `forward` was told to
keep; neither shows in a result beyond rounding. Held by tests/unit/kernels/test_logprobs.py.

A row's maximum m and s = Σ exp(x − m) are brought up to date tile by tile, so that no pass sees a whole row. The gradient of a
log-prob to its logits is onehot − exp(x − m) / s. The backward pass makes exp(x − m) of a tile again, or takes what was kept,
subtracts s at the targets, and leaves the factor −g / s to the vectors [tokens, hidden] on either side of its two products. All
tokens of a tile are summed up at once where they fit in, so a row of the weight's gradient is written once. x − m, and not x −
log-sum-exp, is what is exact among logits of ±10,000.

Time goes into the products (four of them, three where logits are held) and into the first touch of new memory. Keeping a part
saves as much of the fourth; the memory for it is that into which the gradient of the weight grows when a kept part is let go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anabranch.kernels.exponentials import exp_below
from anabranch.kernels.logprob_tiles import Kept, Logits, shaped, targets_in


@dataclass(frozen=True)
class Rows:
    """What is known of each row of logits x: all [tokens], in the wide dtype."""

    top: Tensor  # m, the maximum
    total: Tensor  # s = Σ exp(x − m)
    chosen: Tensor  # x at the target
    moment: Tensor | None  # Σ exp(x − m)·(x − m)

    @classmethod
    def unseen(cls, tokens: int, like: Tensor, *, entropy: bool) -> Rows:
        top = like.new_full((tokens,), torch.finfo(like.dtype).min)  # not −inf, which less itself is no number
        zeros = like.new_zeros(3 if entropy else 2, tokens)
        return cls(top, zeros[0], zeros[1], zeros[2] if entropy else None)

    def of(self, tokens: Tensor) -> Rows:
        return replace(self, top=self.top[tokens], total=self.total[tokens])

    def logprobs(self) -> Tensor:
        return (self.chosen - self.top).sub_(self.total.log())

    def entropies(self) -> Tensor:
        """[tokens], in nats; empty where they were not asked for."""
        return self.total.new_empty(0) if self.moment is None else self.total.log() - self.moment / self.total


def forward(logits: Logits, targets: Tensor, *, entropy: bool, keep_elements: int = 0) -> tuple[Rows, Kept]:
    """Everything that is known of the rows, and exp of as many whole tiles as `keep_elements` has room for.

    Args:
        targets: int64 [N], in 0..V−1.
    """
    rows = Rows.unseen(logits.tokens, logits.hidden, entropy=entropy)
    width = logits.tile[1]
    tiles = min(logits.vocabulary // width, keep_elements // max(1, logits.tokens * width))
    kept = Kept(tiles, logits.tokens, width, logits.hidden)
    room, second = logits.room(), logits.room() if entropy else None
    for index, tile in enumerate(logits.tiles):
        weight, bias = logits.head(tile)
        for block in logits.blocks:
            x = shaped(room, block, tile)
            e = x if second is None else shaped(second, block, tile)
            if index < tiles:
                e = kept.tile(index)[block]
                x = e if second is None else x
            logits.compute(block, weight, bias, x)
            tokens, entries = targets_in(targets, block, tile)
            rows.chosen[block][tokens] = x[tokens, entries]
            top = torch.maximum(rows.top[block], x.amax(1))
            exp_below(x, top, out=e)
            _bring_up_to_date(rows, block, top, x, e)
            if index < tiles:
                kept.tops[index, block] = top
    return rows, kept


def _bring_up_to_date(rows: Rows, block: slice, top: Tensor, x: Tensor, e: Tensor) -> None:
    """With a tile of which `x` is logit − `top` (used up, unless it is `e`), and `e` its exponential."""
    fall = rows.top[block] - top
    shrunk = fall.exp()
    total = rows.total[block]
    if rows.moment is not None:
        rows.moment[block].add_(total * fall).mul_(shrunk).add_(x.mul_(e).sum(1))
    total.mul_(shrunk).add_(e.sum(1))
    rows.top[block] = top


@dataclass(frozen=True)
class Gradients:
    """Of hidden [N, H], weight [V, H] and bias [V], in the dtype of each; None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def backward(
    logits: Logits, targets: Tensor, rows: Rows, kept: Kept | None, grad: Tensor, needed: tuple[bool, bool, bool]
) -> Gradients:
    """Gradients of Σ grad · log-prob. Tokens whose `grad` [N] is 0 cost nothing. `kept` is used up.

    Args:
        needed: whether hidden, weight and bias need one.
    """
    tokens = logits.tokens
    some = grad.nonzero().squeeze(1)  # a NaN is one of them
    if len(some) == tokens:
        again = _Again(logits, targets, rows, kept)
    else:
        again = _Again(logits.of(some), targets[some], rows.of(some), kept, some)
        grad = grad[some]
    found = _gradients(again, grad, needed)
    if found.hidden is None or len(some) == tokens:
        return found
    return replace(
        found, hidden=found.hidden.new_zeros(tokens, *found.hidden.shape[1:]).index_copy_(0, some, found.hidden)
    )


@dataclass(frozen=True)
class _Again:
    """Tiles of d = exp(x − m) − s · onehot: computed again, or from what was kept of all tokens, of which these are `some`."""

    logits: Logits
    targets: Tensor
    rows: Rows
    kept: Kept | None
    some: Tensor | None = None

    def make(self, index: int, block: slice, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Tile `index` of a block of tokens, into `out` [tokens, entries]."""
        top, kept = self.rows.top[block], self.kept
        if kept is not None and index < len(kept):
            which = block if self.some is None else self.some[block]
            torch.mul(kept.tile(index)[which], (kept.tops[index][which] - top).exp_()[:, None], out=out)
        else:
            self.logits.compute(block, weight, bias, out)
            exp_below(out, top, out=out)
        tokens, entries = targets_in(self.targets, block, self.logits.tiles[index])
        out[tokens, entries] -= self.rows.total[block][tokens]

    def done(self, index: int) -> None:
        """Tile `index` is not asked for again."""
        if self.kept is not None:
            self.kept.let_go_before(index + 1)


def _gradients(again: _Again, grad: Tensor, needed: tuple[bool, bool, bool]) -> Gradients:
    """Of all tokens that `again` has."""
    logits = again.logits
    factor = grad / again.rows.total / -logits.temperature  # of the rows of d
    weighted = logits.unscaled * factor[:, None]
    new = torch.empty_like if logits.tokens else torch.zeros_like
    of_hidden = torch.zeros_like(weighted) if needed[0] else None
    of_weight = new(logits.weight, memory_format=torch.contiguous_format) if needed[1] else None
    of_bias = new(logits.bias) if needed[2] and logits.bias is not None else None
    room = logits.room()
    # A sum over blocks in the wide dtype, so that their size does not show in a bf16 gradient.
    scratch = weighted.new_empty(logits.tile[1], weighted.shape[1]) if logits.rounds else None
    for index, tile in enumerate(logits.tiles if logits.tokens else ()):
        weight, bias = logits.head(tile)
        if of_weight is not None:
            sums = of_weight[tile] if scratch is None else scratch[: len(weight)]
        bias_sums = factor.new_zeros(len(weight))
        for block in logits.blocks:
            d = shaped(room, block, tile)
            again.make(index, block, weight, bias, d)
            if of_hidden is not None:
                of_hidden[block].addmm_(d, weight)
            if of_weight is not None:
                sums.addmm_(d.T, weighted[block], beta=int(block.start > 0))  # β = 0: what is there is not read
            if of_bias is not None:
                bias_sums.addmv_(d.T, factor[block])
        if of_weight is not None and scratch is not None:
            of_weight[tile] = sums
        if of_bias is not None:
            of_bias[tile] = bias_sums
        again.done(index)
    if of_hidden is not None:
        of_hidden = of_hidden.mul_(factor[:, None]).to(logits.dtype)
    return Gradients(of_hidden, of_weight, of_bias)
