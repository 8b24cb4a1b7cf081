"""Shares cover everything once, level the ranks out, and read the live weights bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.delta_chunk import Piece
from anabranch.learner.conversions import checkpoint_names
from anabranch.learner.policy import load_model
from anabranch.learner.shares import ArrayShare, ShareImage, Whole, partition, split_evenly
from anabranch.learner.weights import PublishedWeights
from anabranch.schemas.layout import Layout

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def layout_of(sizes: list[int]) -> Layout:
    return Layout.build([(f"t{i:02}", "bf16" if i % 3 else "f32", (n,)) for i, n in enumerate(sizes)])


def cover(pieces: list[Piece], layout: Layout) -> list[int]:
    """How often each element of the layout is covered."""
    times = [np.zeros(t.numel, int) for t in layout.tensors]
    for piece in pieces:
        times[piece.tensor][piece.start : piece.stop] += 1
    return [int(n) for part in times for n in part]


@given(SIZES, st.integers(1, 5), st.data())
def test_every_element_is_in_one_share(sizes: list[int], world_size: int, data: st.DataObject) -> None:
    layout = layout_of(sizes)
    tensors = range(len(sizes))
    together = data.draw(st.lists(st.sampled_from(tensors), unique=True))
    wholes = [Whole(tuple(together[i : i + 2])) for i in range(0, len(together), 2)]
    shares = split_evenly(layout, [t for t in tensors if t not in together], wholes, world_size)
    assert len(shares) == world_size
    assert set(cover([p for share in shares for p in share], layout)) <= {1}
    for share in shares:
        assert [(p.tensor, p.start) for p in share] == sorted({(p.tensor, p.start) for p in share})
        assert len({p.tensor for p in share}) == len(share), "one piece of a tensor"
    for whole in wholes:
        sized = [t for t in whole.tensors if layout.tensors[t].numel]
        owners = {r for r, share in enumerate(shares) for p in share if p.tensor in sized}
        assert len(owners) == bool(sized)


@given(SIZES, st.integers(1, 5))
def test_shares_of_plain_tensors_differ_by_an_element_or_two(sizes: list[int], world_size: int) -> None:
    shares = split_evenly(layout_of(sizes), range(len(sizes)), [], world_size)
    loads = [sum(p.size for p in share) for share in shares]
    assert max(loads) - min(loads) <= 2


def test_whoever_has_the_experts_has_less_of_the_rest() -> None:
    layout = layout_of([60, 20, 40])
    shares = split_evenly(layout, [1, 2], [Whole((0,))], 2)
    assert shares == [[Piece(0, 0, 60)], [Piece(1, 0, 20), Piece(2, 0, 40)]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_partitions_of_zero_3_cover_a_tensor_once(world_size: int) -> None:
    layout = layout_of([10, 1, 0, 6])
    pieces = [
        p
        for tensor, spec in enumerate(layout.tensors)
        for rank in range(world_size)
        for p in partition(layout, tensor, rank, -(-spec.numel // world_size))
    ]
    assert set(cover(pieces, layout)) == {1}


def gathered(published: PublishedWeights, world_size: int) -> dict[str, np.ndarray]:
    """What all shares hold, put together."""
    out = {name: np.zeros_like(bits) for name, bits in published.bits().items()}
    for rank in range(world_size):
        share = published.share(rank, world_size)
        image = share.image()
        share.copy_to(image)
        for piece in share.pieces:
            out[published.layout.tensors[piece.tensor].name][piece.start : piece.stop] = image.bits(piece)
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("which", ["model_dir", "untied_model_dir", "moe_dir"])
@pytest.mark.parametrize("masters", [False, True])
def test_live_shares_together_are_the_checkpoint(which: str, world_size: int, masters: bool, request) -> None:
    lm = load_model(request.getfixturevalue(which), torch.bfloat16)
    published = PublishedWeights(lm)
    if masters:
        lm.float()
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.001)
    whole = published.bits()
    assert {n: b.tobytes() for n, b in gathered(published, world_size).items()} == {
        n: b.tobytes() for n, b in whole.items()
    }
    loads = [sum(p.size for p in published.share(r, world_size).pieces) for r in range(world_size)]
    assert min(loads) > 0.5 * max(loads)


def test_a_snapshot_does_not_change_with_the_weights(model_dir: Path) -> None:
    lm = load_model(model_dir, torch.bfloat16)
    share = PublishedWeights(lm).share()
    image = share.image()
    share.copy_to(image)
    before = {p: image.bits(p).copy() for p in share.pieces}
    with torch.no_grad():
        for p in lm.parameters():
            p.zero_()
    assert all(np.array_equal(image.bits(p), bits) for p, bits in before.items())


def test_converted_tensors_come_from_small_groups(moe_dir: Path) -> None:
    """So that under ZeRO-3 no rank gathers more than one layer's experts."""
    lm = load_model(moe_dir, torch.bfloat16)
    live = dict(lm.state_dict())
    names = checkpoint_names(lm, live)
    targets = [t for c in names.conversions for t in c.targets]
    assert sorted([*targets, *names.plain]) == sorted(names.shapes)
    assert sum("experts" in t for t in targets) == len(targets) == 2 * 4 * 3
    assert all(len(c.sources) == 1 for c in names.conversions)
    assert all(not np.any([s in names.plain.values() for s in c.sources]) for c in names.conversions)


def test_an_image_refuses_what_it_does_not_hold() -> None:
    layout = layout_of([10, 10])
    image = ShareImage(layout, [Piece(0, 2, 8)])
    image.read("t00", 2, 8)[:] = 7
    assert image.read("t00", 4, 6).tolist() == [7, 7]
    for start, stop in [(1, 4), (4, 9), (6, 5)]:
        with pytest.raises(ValueError, match="not in this share"):
            image.read("t00", start, stop)


def test_shares_of_arrays_read_them_as_they_are_now() -> None:
    layout = layout_of([7, 9])
    state = {"t00": np.zeros(7, np.uint32), "t01": np.zeros(9, np.uint16)}
    shares = [ArrayShare(layout, state, rank=r, world_size=2) for r in range(2)]
    state["t01"][8] = 5
    images = [share.image() for share in shares]
    for share, image in zip(shares, images, strict=True):
        share.copy_to(image)
    assert images[1].bits(Piece(1, 8, 9)).tolist() == [5]
