"""Logits [tokens, vocabulary] a tile at a time, and tiles that are kept from the forward pass to the backward pass.

Invariant: `Logits.compute` gives the logits of the model's own head to rounding, whatever the tiles; `Kept` holds no more than it
was made for, and less with every slab that has been passed. Held by tests/unit/kernels/test_logprob_tiles.py.

The product is done in float32 also for bf16 and float16, and rounded to the dtype of the inputs: that is what the model's
own head gives, which adds up in float32 too. In bf16 itself a CPU without instructions for it takes nine times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE_ELEMENTS = 2**22  # of one tile: 16 MiB in float32
TILE_TOKENS = 4096
SLAB_BYTES = 2**26  # glibc returns what is larger than 32 MiB to the system as soon as it is freed


def tile_shape(
    tokens: int, vocabulary: int, chunk_tokens: int | None, chunk_vocabulary: int | None, *, copied_width: int = 0
) -> tuple[int, int]:
    """Tokens and entries of the vocabulary of a tile: what is asked for, else about TILE_ELEMENTS in all, in the tile and in
    what is copied of the head for it: `copied_width` for each entry, where the head is not in the wide dtype already."""
    height = max(1, min(tokens, chunk_tokens or TILE_TOKENS))
    entries = chunk_vocabulary or max(TILE_ELEMENTS // max(height, copied_width), 256)
    return height, max(1, min(vocabulary, entries))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which products are added up, and results come."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Logits:
    """(`hidden` [N, H] · `weight` [V, H]ᵀ + `bias` [V]) / temperature, in tiles of at most `tile` = (tokens, entries)."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, tile: tuple[int, int]
    ) -> None:
        self.dtype = hidden.dtype
        self.wide = wide_dtype(hidden.dtype)
        self.temperature = temperature
        self.weight, self.bias = weight, bias
        self.tokens, self.vocabulary = hidden.shape[0], weight.shape[0]
        self.tile = tile
        self.rounds = self.dtype != self.wide
        self.unscaled = hidden.to(self.wide).contiguous()
        # Logits that are rounded are divided afterwards, as a sampler does it.
        self.hidden = self.unscaled if self.rounds or temperature == 1 else self.unscaled / temperature
        self.blocks = list(_slices(self.tokens, tile[0]))  # of tokens
        self.tiles = list(_slices(self.vocabulary, tile[1]))  # of the vocabulary

    def of(self, tokens: Tensor) -> Logits:
        """Those of some tokens only (int64 [n])."""
        hidden = self.unscaled.index_select(0, tokens).to(self.dtype)  # exact: it had that dtype before
        return Logits(hidden, self.weight, self.bias, self.temperature, self.tile)

    def room(self) -> Tensor:
        """For one tile, [elements]; `shaped` makes a tile of it."""
        return self.hidden.new_empty(min(self.tile[0], self.tokens) * min(self.tile[1], self.vocabulary))

    def head(self, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Weight [entries, H] and bias [entries] of a tile, in the wide dtype."""
        return self.weight[tile].to(self.wide), None if self.bias is None else self.bias[tile].to(self.wide)

    def compute(self, block: slice, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The tile of a block of tokens with `head`'s part of the vocabulary, into `out` [tokens, entries]."""
        hidden = self.hidden[block]
        if bias is None:
            torch.mm(hidden, weight.T, out=out)
        else:
            torch.addmm(bias, hidden, weight.T, beta=1 if self.rounds else 1 / self.temperature, out=out)
        if self.rounds:
            out.copy_(out.to(self.dtype))
            if self.temperature != 1:
                out.div_(self.temperature)


class Kept:
    """exp(x − top) of the first tiles, x being the logits and `top` the maximum of their row by then."""

    def __init__(self, tiles: int, tokens: int, entries: int, like: Tensor) -> None:
        tile_bytes = max(1, tokens * entries * like.element_size())
        self._per_slab = -(-SLAB_BYTES // tile_bytes)
        self._slabs: list[Tensor | None] = [
            like.new_empty(min(self._per_slab, tiles - first), tokens, entries)
            for first in range(0, tiles, self._per_slab)
        ]
        self.tops = like.new_empty(tiles, tokens)

    def __len__(self) -> int:
        return len(self.tops)

    def tile(self, index: int) -> Tensor:
        """Tile `index`, [tokens, entries]."""
        slab = self._slabs[index // self._per_slab]
        assert slab is not None, f"tile {index} was let go of"
        return slab[index % self._per_slab]

    def let_go_before(self, index: int) -> None:
        """Of the slabs in which there are only tiles before `index`."""
        slab = index // self._per_slab
        self._slabs[:slab] = [None] * min(slab, len(self._slabs))


def shaped(room: Tensor, block: slice, tile: slice) -> Tensor:
    """A contiguous [tokens of block, entries of tile] in `room`."""
    height, width = block.stop - block.start, tile.stop - tile.start
    return room[: height * width].view(height, width)


def targets_in(targets: Tensor, block: slice, tile: slice) -> tuple[Tensor, Tensor]:
    """Which tokens of `block` have their target in `tile`, and where there: places from the tile's corner on, int64 [n] each."""
    here = targets[block]
    tokens = ((here >= tile.start) & (here < tile.stop)).nonzero().squeeze(1)
    return tokens, here[tokens] - tile.start


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
