"""The index map, on small modules whose loaders do what vLLM's do: fuse, slice, pad, tie, and (sometimes) compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.producers.index_map import CopyRecord, IndexMap, trace
from anabranch.schemas.errors import ModelMismatchError
from anabranch.schemas.layout import Layout

HIDDEN, HEADS, KV, VOCAB, PADDED = 4, 6, 2, 5, 8


class Loadable(torch.nn.Module):
    """A module with vLLM's `load_weights`; `loaders` maps a checkpoint name to what takes the tensor."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False))
        self.loaders: dict[str, Callable[[torch.Tensor], object]] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.loaders:
                self.loaders[name](tensor)


def fused(rank: int = 0, ranks: int = 1) -> tuple[Loadable, Layout]:
    """q/k/v in one parameter (columns split over ranks), a row-parallel output, a padded embedding."""
    q, kv, out = HEADS // ranks, KV // ranks, HEADS // ranks
    model = Loadable(qkv=(q + 2 * kv, HIDDEN), o=(HIDDEN, out), embed=(PADDED, HIDDEN))

    def into_qkv(start: int, rows: int) -> Callable[[torch.Tensor], object]:
        def load(w: torch.Tensor) -> object:
            return model.qkv.data.narrow(0, start, rows).copy_(w.narrow(0, rank * rows, rows))

        return load

    def embed(w: torch.Tensor) -> None:
        model.embed.data[: w.shape[0]].copy_(w)
        model.embed.data[w.shape[0] :].fill_(0)

    model.loaders = {
        "q": into_qkv(0, q), "k": into_qkv(q, kv), "v": into_qkv(q + kv, kv),
        "o": lambda w: model.o.data.copy_(w.narrow(1, rank * out, out)), "embed": embed,
    }  # fmt: skip
    shapes = {
        "q": (HEADS, HIDDEN),
        "k": (KV, HIDDEN),
        "v": (KV, HIDDEN),
        "o": (HIDDEN, HEADS),
        "embed": (VOCAB, HIDDEN),
    }
    return model, Layout.build((n, "bf16", s) for n, s in shapes.items())


def scatter(index_map: IndexMap, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
    for record in index_map.copies[name]:
        whole = record.shape == (index_map.layout.by_name[name].numel,)
        mask, offsets = record.locate(indices, whole=whole)
        index_map.parameters[record.parameter][offsets] = values if mask is None else values[mask]


def random_state(layout: Layout) -> dict[str, torch.Tensor]:
    return {t.name: torch.randn(t.shape).bfloat16() for t in layout.tensors}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_scattering_every_element_equals_the_models_own_loader(rank: int, ranks: int) -> None:
    by_loader, layout = fused(rank, ranks)
    by_map, _ = fused(rank, ranks)
    index_map = trace(by_map, layout, whole=ranks == 1)
    assert torch.equal(by_map.qkv, torch.full_like(by_map.qkv, -1.0)), "tracing must not write"
    state = random_state(layout)
    by_loader.load_weights(state.items())
    for name, tensor in state.items():
        order = torch.randperm(tensor.numel())
        scatter(index_map, name, order, tensor.flatten()[order].float())
    assert torch.equal(by_map.qkv, by_loader.qkv)
    assert torch.equal(by_map.o, by_loader.o)
    assert torch.equal(by_map.embed[:VOCAB], by_loader.embed[:VOCAB])
    assert index_map.padding == {"embed": (PADDED - VOCAB) * HIDDEN}


def test_a_plain_copy_is_one_flat_record() -> None:
    model, layout = fused()
    index_map = trace(model, layout)
    assert index_map.copies["k"] == (CopyRecord("qkv", (KV * HIDDEN,), 0, (1,), HEADS * HIDDEN, (1,)),)
    assert index_map.computed == ()


def test_tied_parameters_count_once() -> None:
    model, layout = fused()
    model.lm_head = model.embed
    assert "lm_head" not in trace(model, layout).parameters


def test_a_name_that_the_loader_ignores_is_refused() -> None:
    model, layout = fused()
    extra = Layout.build([*((t.name, t.dtype, t.shape) for t in layout.tensors), ("stray", "bf16", (2,))])
    with pytest.raises(ModelMismatchError, match="ignores checkpoint tensor 'stray'"):
        trace(model, extra)


def test_a_tensor_of_another_shape_is_refused() -> None:
    model, layout = fused()
    wider = Layout.build((t.name, t.dtype, (*t.shape[:-1], t.shape[-1] + 1)) for t in layout.tensors)
    with pytest.raises(ModelMismatchError):
        trace(model, wider)


def test_a_runtime_element_that_nothing_covers_is_refused() -> None:
    model, layout = fused()
    without_k = Layout.build((t.name, t.dtype, t.shape) for t in layout.tensors if t.name != "k")
    with pytest.raises(ModelMismatchError, match=r"8 of the 40 elements of runtime parameter 'qkv'"):
        trace(model, without_k)


def test_two_tensors_for_one_place_are_refused() -> None:
    model, layout = fused()
    model.loaders["v"] = model.loaders["k"]
    with pytest.raises(ModelMismatchError, match="two checkpoint tensors write"):
        trace(model, layout)


def test_a_packed_parameter_is_refused() -> None:
    model, layout = fused()
    model.o = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(ModelMismatchError, match="'o' is empty"):
        trace(model, layout)


@pytest.mark.parametrize(
    "loader",
    [
        lambda p, w: p.copy_(w * 2),
        lambda p, w: p.copy_(w.float().t().contiguous().t()),
        lambda p, w: p.add_(w),
        lambda p, w: p.fill_(w.max().item()),
        lambda p, w: p.copy_(w) if bool((w > 0).any()) else None,
        lambda p, w: p.copy_(w[0]),  # broadcast: one element feeds many
    ],
    ids=["scales", "casts", "adds", "reads a value", "branches on a value", "broadcasts"],
)
def test_a_loader_that_computes_is_found_out(loader: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    model, layout = fused()
    model.loaders["o"] = lambda w: loader(model.o.data, w)
    before = model.o.clone()
    index_map = trace(model, layout)
    assert index_map.computed == ("o",)
    assert "o" not in index_map.copies
    assert torch.equal(model.o, before)


@given(data=st.data())
def test_locate_agrees_with_a_view(data: st.DataObject) -> None:
    """For a random box, permuted, of a random tensor: locate finds exactly the box's elements, at the right targets."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    box = whole
    for dim, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        box = box.narrow(dim, start, data.draw(st.integers(1, size - start)))
    box = box.permute(data.draw(st.permutations(range(len(shape)))))

    model = Loadable(p=(int(box.numel()),))
    model.loaders["w"] = lambda w: model.p.data.view(box.shape).copy_(
        w.as_strided(box.shape, box.stride(), box.storage_offset())
    )
    layout = Layout.build([("w", "f32", tuple(shape))])
    (record,) = trace(model, layout, whole=False).copies["w"]
    mask, offsets = record.locate(whole.flatten())
    expected = torch.zeros(whole.numel(), dtype=torch.bool)
    expected[box.flatten()] = True
    assert mask is not None
    assert torch.equal(mask, expected)
    runtime = torch.full((box.numel(),), -1)
    runtime[offsets] = whole.flatten()[mask]
    assert torch.equal(runtime, box.flatten())
