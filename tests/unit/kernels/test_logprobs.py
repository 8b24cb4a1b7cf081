import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch.kernels import logprob_tiles
from anabranch.kernels.logprobs import chosen_logprobs, reference_logprobs
from anabranch.schemas.errors import ModelMismatchError

# Of the largest value, of log-probs and of gradients.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TILES = st.one_of(st.none(), st.integers(1, 45))


def inputs(
    dtype: torch.dtype = torch.float64,
    *,
    n: int = 7,
    hidden: int = 5,
    vocab: int = 11,
    bias: bool = True,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(n, hidden), (vocab, hidden), (vocab,)]
    h, w, b = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return h, w, b if bias else None, torch.randint(0, vocab, (n,), generator=g)


def with_gradients(
    function: Any, h: Tensor, w: Tensor, b: Tensor | None, *rest: Any, upstream: Tensor, **options: Any
) -> Any:
    """[log-probs, entropies, a gradient for each of h, w, b]"""
    leaves = [x for x in (h, w, b) if x is not None]
    values, entropies = function(h, w, b, *rest, **options)
    return [values.detach(), entropies, *torch.autograd.grad(values @ upstream.to(values.dtype), leaves)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.shape == theirs.shape
        if theirs.numel():
            worst = float((mine.double() - theirs.double()).abs().max())
            assert worst <= tolerance * max(1.0, float(theirs.abs().max()))


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    n=st.integers(0, 40),
    hidden=st.integers(1, 20),
    vocab=st.integers(1, 60),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    chunks=st.tuples(TILES, TILES),
    kept_share=st.sampled_from([0.0, 0.33, 0.7, 1.0]),
    entropy=st.booleans(),
    silent=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_any_tiles_give_the_values_and_gradients_of_float64(
    dtype: torch.dtype, n: int, hidden: int, vocab: int, bias: bool, temperature: float,
    chunks: tuple[int | None, int | None], kept_share: float, entropy: bool, silent: float,
) -> None:  # fmt: skip
    h, w, b, targets = inputs(dtype, n=n, hidden=hidden, vocab=vocab, bias=bias, seed=n + 41 * vocab)
    upstream = torch.linspace(-1, 2, n) * (torch.rand(n, generator=torch.Generator().manual_seed(n)) >= silent)
    ours = with_gradients(
        chosen_logprobs, h, w, b, targets, upstream=upstream, temperature=temperature, entropy=entropy,
        chunk_tokens=chunks[0], chunk_vocabulary=chunks[1], kept_share=kept_share,
    )  # fmt: skip
    exact = with_gradients(
        reference_logprobs, *(None if x is None else x.detach().double().requires_grad_() for x in (h, w, b)),
        targets, upstream=upstream, temperature=temperature,
    )  # fmt: skip
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(g.dtype == dtype for g in ours[2:])
    if not entropy:
        assert ours[1].shape == (0,)
        exact[1] = exact[1][:0]
    assert_close(ours, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("kept_share", [0.0, 1.0])
def test_gradients_match_finite_differences(kept_share: float) -> None:
    h, w, b, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda *x: chosen_logprobs(
            *x, targets, temperature=1.3, chunk_tokens=3, chunk_vocabulary=4, kept_share=kept_share
        )[0],
        (h, w, b),
        nondet_tol=1e-12,  # a second pass finds nothing kept and computes again
    )


def test_by_hand() -> None:
    # Logits (0, ln 3): probabilities 1/4 and 3/4; at temperature 2 the odds are 1 : √3.
    h, w = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    logprobs, entropy = chosen_logprobs(h, w, None, targets, temperature=1.0, chunk_vocabulary=1)
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75])
    assert entropy[0].item() == pytest.approx(0.5623351446)  # −(¼ ln ¼ + ¾ ln ¾)
    warm, _ = chosen_logprobs(h, w, None, targets, temperature=2.0)
    assert warm.exp()[1].item() == pytest.approx(3**0.5 / (1 + 3**0.5))


def test_bf16_logits_are_rounded_as_the_models_own() -> None:
    h, w, b, targets = inputs(torch.bfloat16, n=64, hidden=16, vocab=40)
    ours, _ = chosen_logprobs(h, w, b, targets, temperature=0.7, chunk_tokens=9, chunk_vocabulary=7)
    same, _ = reference_logprobs(h, w, b, targets, temperature=0.7)
    exact, _ = reference_logprobs(*(x.detach().double() for x in (h, w, b)), targets, temperature=0.7)  # type: ignore[union-attr]
    apart = (ours - same).abs().detach()
    # A product that lies on the border of two bf16 numbers may be rounded to either: seldom.
    assert float((apart < 1e-5).float().mean()) > 0.8
    assert float(apart.mean()) < 0.1 * float((same - exact).abs().detach().mean())


def test_bf16_gradients_do_not_show_the_tiles() -> None:
    h, w, _, targets = inputs(torch.bfloat16, n=64, hidden=16, vocab=40, bias=False)
    upstream = torch.ones(64)
    whole, parts = (
        with_gradients(chosen_logprobs, h, w, None, targets, upstream=upstream, temperature=1.0, chunk_tokens=n)
        for n in (64, 1)
    )
    assert_close(parts, whole, 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_share", [0.0, 1.0])
@pytest.mark.parametrize("tiles", [1, 7, 64])
def test_logits_of_ten_thousand_stay_numbers(dtype: torch.dtype, kept_share: float, tiles: int) -> None:
    """Ascending along the vocabulary in one row, descending in the other: the maximum is in the last tile and in the first."""
    h = torch.tensor([[1e4], [-1e4]], dtype=dtype).requires_grad_()
    w = torch.linspace(-1, 1, 64).to(dtype)[:, None].requires_grad_()
    targets = torch.tensor([63, 3])
    options: dict[str, Any] = {"upstream": torch.ones(2), "temperature": 1.0}
    ours = with_gradients(
        chosen_logprobs, h, w, None, targets, chunk_vocabulary=tiles, kept_share=kept_share, **options
    )  # fmt: skip
    exact = with_gradients(reference_logprobs, h, w, None, targets, **options)
    assert all(x.isfinite().all() for x in ours)
    assert_close(ours, exact, 1e-5 if dtype == torch.float32 else 0.01)
    assert ours[0][0] == 0


def test_a_second_pass_through_the_same_graph_gives_the_same_gradients() -> None:
    h, w, b, targets = inputs()
    values, _ = chosen_logprobs(h, w, b, targets, temperature=1.0, chunk_vocabulary=2, kept_share=1.0)
    first, second = (torch.autograd.grad(values.sum(), (h, w, b), retain_graph=True) for _ in range(2))
    assert_close(list(second), list(first), 1e-12)


def test_only_the_gradients_that_are_needed() -> None:
    h, w, b, targets = inputs()
    expected = torch.autograd.grad(chosen_logprobs(h, w, b, targets, temperature=1.0)[0].sum(), (h, w, b))
    for i, leaf in enumerate((h, w, b)):
        others = [x if x is leaf else x.detach() for x in (h, w, b) if x is not None]
        (got,) = torch.autograd.grad(chosen_logprobs(*others, targets, temperature=1.0)[0].sum(), leaf)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected[i])


def test_inputs_that_are_not_contiguous() -> None:
    h, w, b, targets = inputs(n=8, vocab=12)
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in (h, w)]
    wide_targets = torch.stack([targets, targets], dim=1)[:, 0]
    upstream = torch.linspace(-1, 2, 8)
    options: dict[str, Any] = {"upstream": upstream, "temperature": 1.0, "chunk_tokens": 3, "chunk_vocabulary": 5}
    ours = with_gradients(chosen_logprobs, *strided, b, wide_targets, **options)
    assert_close(ours, with_gradients(chosen_logprobs, h, w, b, targets, **options), 1e-12)


def test_a_gradient_that_is_no_number_is_not_taken_for_zero() -> None:
    h, w, _, targets = inputs(bias=False)
    values, _ = chosen_logprobs(h, w, None, targets, temperature=1.0)
    upstream = torch.zeros(7, dtype=torch.float64)
    upstream[2] = math.nan
    (got,) = torch.autograd.grad(values, h, upstream)
    assert got.isnan().any(dim=1).tolist() == [False, False, True, False, False, False, False]


def test_tokens_without_gradient_cost_no_product() -> None:
    h, w, _, targets = inputs(n=40, bias=False)
    values, _ = chosen_logprobs(h, w, None, targets, temperature=1.0, kept_share=0.0)
    upstream = torch.zeros(40, dtype=torch.float64)
    upstream[7] = 1.0
    with Largest() as seen:
        torch.autograd.grad(values, h, upstream)
    assert seen.shapes["aten.mm.out"] == [(1, 11)]  # one token's logits


def test_entropy_carries_no_gradient() -> None:
    h, w, b, targets = inputs()
    _, entropy = chosen_logprobs(h, w, b, targets, temperature=1.0)
    assert not entropy.requires_grad


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int) -> None:
    h, w, b, targets = inputs()
    targets[3] = wrong
    with pytest.raises(ModelMismatchError, match=f"of token {wrong}, and the output head has 11 rows"):
        chosen_logprobs(h, w, b, targets, temperature=1.0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, and the shapes that each operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
                self.shapes.setdefault(str(func), []).append(tuple(x.shape))
        return found


@pytest.mark.parametrize("entropy", [True, False])
def test_no_tensor_is_larger_than_a_tile_or_what_is_kept(entropy: bool) -> None:
    n, vocab = 60, 400
    h, w, _, targets = inputs(n=n, vocab=vocab, hidden=2, bias=False)
    with Largest() as seen:
        values, _ = chosen_logprobs(
            h, w, None, targets, temperature=1.0, entropy=entropy, chunk_tokens=30, chunk_vocabulary=50, kept_share=0.3
        )
        torch.autograd.grad(values.sum(), (h, w))
    assert seen.elements == 2 * n * 50  # two tiles of the eight are 30 % and less
    with Largest() as seen, torch.no_grad():
        chosen_logprobs(h, w, None, targets, temperature=1.0, chunk_tokens=30, chunk_vocabulary=50)
    assert seen.elements == 30 * 50  # no backward pass follows: nothing is kept


def test_of_a_bf16_head_no_more_is_widened_than_a_tile_for_few_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_tiles, "TILE_ELEMENTS", 2**14)
    h, w, _, targets = inputs(torch.bfloat16, n=2, hidden=64, vocab=1000, bias=False)
    with Largest() as seen, torch.no_grad():
        chosen_logprobs(h, w, None, targets, temperature=1.0)
    assert seen.elements == 256 * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"targets": torch.zeros(6, dtype=torch.int64)}, "do not go together"),  # a log-prob would be of nothing
        ({"hidden": torch.zeros(1, 7, 5)}, "do not go together"),
        ({"bias": torch.zeros(10)}, "do not go together"),
        ({"weight": torch.zeros(11, 5, dtype=torch.bfloat16)}, "one floating dtype"),  # no gradient could be written
        ({"targets": torch.zeros(7, dtype=torch.int32)}, "int64 targets"),
        ({"temperature": 0.0}, "temperature 0.0 is not above 0"),
        ({"temperature": -1.0}, "not above 0"),
        ({"temperature": math.nan}, "not above 0"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change: dict[str, Any], said: str) -> None:
    h, w, b, targets = inputs(torch.float32)
    given: dict[str, Any] = {"hidden": h, "weight": w, "bias": b, "targets": targets, "temperature": 1.0} | change
    with pytest.raises(ValueError, match=said):
        chosen_logprobs(**given)
