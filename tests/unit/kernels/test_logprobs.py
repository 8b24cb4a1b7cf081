import pytest
import torch

from anabranch.kernels.logprobs import chosen_logprobs, reference_logprobs


def inputs(dtype=torch.float64, *, n=7, hidden=5, vocab=11, bias=True):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(n, hidden, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return h, w, b, torch.randint(0, vocab, (n,), generator=g)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100, None])
@pytest.mark.parametrize("bias", [True, False])
def test_any_chunk_size_gives_the_reference_and_its_gradients(chunk, bias):
    h, w, b, targets = inputs(bias=bias)
    leaves = [x for x in (h, w, b) if x is not None]
    upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
    expected, expected_entropy = reference_logprobs(h, w, b, targets, temperature=0.7)
    expected_grads = torch.autograd.grad(expected @ upstream, leaves)
    got, entropy = chosen_logprobs(h, w, b, targets, temperature=0.7, chunk_tokens=chunk)
    grads = torch.autograd.grad(got @ upstream, leaves)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_match_finite_differences():
    h, w, b, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda *x: chosen_logprobs(*x, targets, temperature=1.3, chunk_tokens=3)[0], (h, w, b)
    )


def test_by_hand():
    # Logits (0, ln 3): probabilities 1/4 and 3/4; at temperature 2 the odds are 1 : √3.
    h, w = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[0.0], [3.0]], dtype=torch.float64).log1p()
    w[1] = torch.tensor(3.0, dtype=torch.float64).log()
    targets = torch.tensor([0, 1])
    logprobs, entropy = chosen_logprobs(h, w, None, targets, temperature=1.0)
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75])
    assert entropy[0].item() == pytest.approx(0.5623351446)  # −(¼ ln ¼ + ¾ ln ¾)
    warm, _ = chosen_logprobs(h, w, None, targets, temperature=2.0)
    assert warm.exp()[1].item() == pytest.approx(3**0.5 / (1 + 3**0.5))


def test_bf16_inputs_give_float32_logprobs_and_the_chunk_size_hardly_shows():
    h, w, _, targets = inputs(torch.bfloat16, n=64, hidden=16, bias=False)
    whole, _ = chosen_logprobs(h, w, None, targets, temperature=1.0, chunk_tokens=64)
    parts, _ = chosen_logprobs(h, w, None, targets, temperature=1.0, chunk_tokens=5)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    (a,) = torch.autograd.grad(whole.sum(), w)
    (b,) = torch.autograd.grad(parts.sum(), w)
    assert a.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)


def test_entropy_carries_no_gradient():
    h, w, b, targets = inputs()
    _, entropy = chosen_logprobs(h, w, b, targets, temperature=1.0)
    assert not entropy.requires_grad


def test_no_tokens_is_no_error():
    h, w, b, _ = inputs(n=0)
    logprobs, _ = chosen_logprobs(h, w, b, torch.empty(0, dtype=torch.int64), temperature=1.0)
    grads = torch.autograd.grad(logprobs.sum(), (h, w, b))
    assert all((g == 0).all() for g in grads)
