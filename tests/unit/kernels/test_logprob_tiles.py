import weakref

import pytest
import torch

from anabranch.kernels import logprob_tiles
from anabranch.kernels.logprob_tiles import TILE_ELEMENTS, Kept, Logits, shaped, targets_in, tile_shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (7, 11), (2, 11), (100, 100)])
def test_tiles_are_the_logits_of_the_head(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g).to(dtype) for s in ((7, 5), (11, 5), (11,)))
    logits = Logits(h, w, b, 0.5, tile)
    found = torch.full((7, 11), torch.nan, dtype=logits.wide)
    room = logits.room()
    for entries in logits.tiles:
        weight, bias = logits.head(entries)
        for block in logits.blocks:
            x = shaped(room, block, entries)
            logits.compute(block, weight, bias, x)
            found[block, entries] = x
    expected = torch.nn.functional.linear(h, w, b).to(logits.wide) / 0.5
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype != torch.bfloat16 else 0.07, rtol=1e-5)


def test_shapes_of_tiles() -> None:
    assert tile_shape(4096, 151_936, None, None) == (4096, TILE_ELEMENTS // 4096)
    assert tile_shape(10, 151_936, None, None) == (10, 151_936)
    assert tile_shape(10**6, 151_936, None, None) == (4096, 1024)
    assert tile_shape(100, 50, 7, 9) == (7, 9)
    assert tile_shape(100, 50, None, 1000) == (100, 50)
    assert tile_shape(0, 50, None, None) == (1, 50)


def test_targets_of_a_tile_counted_from_its_corner() -> None:
    tokens, entries = targets_in(torch.tensor([9, 5, 4, 7, 8]), slice(1, 5), slice(5, 8))
    assert tokens.tolist() == [0, 2]
    assert entries.tolist() == [0, 2]


def test_slabs_are_let_go_of_as_soon_as_they_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_tiles, "SLAB_BYTES", 2 * 6 * 4)
    kept = Kept(5, 2, 3, torch.empty(0))  # a tile is 24 bytes: slabs of two, two and one
    assert [float(kept.tile(i).fill_(i).sum()) for i in range(5)] == [0, 6, 12, 18, 24]
    slab = weakref.ref(kept.tile(0)._base)
    kept.let_go_before(1)
    assert slab() is not None
    assert kept.tile(1).sum() == 6
    kept.let_go_before(2)
    assert slab() is None
    with pytest.raises(AssertionError, match="let go of"):
        kept.tile(1)
    assert kept.tile(4).sum() == 24
