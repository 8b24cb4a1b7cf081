from pathlib import Path

import pytest
import torch
from torch import nn

from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.learner.packed_attention import use_packed_attention
from anabranch.learner.policy import MasterWeights, PolicyModule, load_model
from anabranch.learner.recompute import recompute_layers
from anabranch.schemas.errors import ConfigError


def ask(module: nn.Module, *, packed: bool) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 2, 7, 1, 30, 8, 3]])
    positions, segments = torch.arange(8)[None], torch.empty((0, 3), dtype=torch.int64)
    if packed:
        positions, segments = (
            torch.tensor([[0, 1, 2, 3, 2, 3, 0, 1]]),
            torch.tensor([[0, 2, -1], [2, 2, 0], [4, 2, 0], [6, 2, -1]]),
        )
    return module(ids, positions, segments, torch.arange(7), ids[0, 1:])[0]


def gradients(model_dir: Path, *, masters: bool, packed: bool, recomputed: bool) -> list[torch.Tensor]:
    policy = PolicyModule(load_model(model_dir, torch.float32), 1.0)
    use_packed_attention(policy, SegmentPlan.of)
    if recomputed:
        recompute_layers(policy.lm, replaced_weights=masters)
    module: nn.Module = policy
    if masters:
        module = MasterWeights(policy, torch.bfloat16, torch.float32)
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                p.mul_(1 + 1e-3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))  # off the grid
    ask(module, packed=packed).sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_gradients_are_the_same_bits(model_dir, masters, packed):
    plain = gradients(model_dir, masters=masters, packed=packed, recomputed=False)
    again = gradients(model_dir, masters=masters, packed=packed, recomputed=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_layers_run_twice_and_only_where_there_is_a_gradient(model_dir):
    policy = PolicyModule(load_model(model_dir, torch.float32), 1.0)
    calls: list[int] = []
    policy.lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute_layers(policy.lm, replaced_weights=False)
    with torch.no_grad():
        ask(policy, packed=False)
    assert len(calls) == 1
    ask(policy, packed=False).sum().backward()
    assert len(calls) == 3


def test_activations_are_not_kept(model_dir):
    kept = {}
    for recomputed in (False, True):
        policy = PolicyModule(load_model(model_dir, torch.float32), 1.0)
        if recomputed:
            recompute_layers(policy.lm, replaced_weights=False)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: (s.append(t.numel()), t)[1], lambda t: t):
            ask(policy, packed=False)
        kept[recomputed] = sum(saved)
    assert kept[True] < kept[False] / 2


def test_a_model_that_does_not_name_its_layers_is_refused():
    with pytest.raises(ConfigError, match="gradient_checkpointing = false"):
        recompute_layers(nn.Linear(2, 2), replaced_weights=False)
