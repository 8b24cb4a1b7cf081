import torch

from tests.unit.kernels.token_samples import tokens


def test_a_sum_per_rollout_is_a_sum_over_its_own_tokens_with_gradient():
    ell = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, requires_grad=True)
    of = tokens(ell, ell.detach(), lengths=[1, 3])
    sums = of.per_rollout(of.ell)
    assert sums.tolist() == [1.0, 14.0]
    (grad,) = torch.autograd.grad((sums * torch.tensor([2.0, 5.0])).sum(), ell)
    assert grad.tolist() == [2.0, 5.0, 5.0, 5.0]


def test_what_belongs_to_a_rollout_reaches_each_of_its_tokens():
    ell = torch.zeros(4)
    of = tokens(ell, ell, [3.0, 7.0], lengths=[1, 3])
    assert of.advantages.tolist() == [3.0, 7.0, 7.0, 7.0]
    assert of.spread(torch.tensor([1, 2])).tolist() == [1, 2, 2, 2]
