"""Packed rows, with and without shared prompts, against padded ones: log-probs, gradients, whole steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.learner.packed_attention import use_packed_attention
from anabranch.learner.policy import MasterWeights, PolicyModule, load_model
from anabranch.learner.row_layout import RowLayout
from anabranch.learner.step import microbatch_loss, plan_step
from anabranch.schemas.config import CorrectionSection
from tests.unit.learner.conftest import make_batch

CPU = torch.device("cpu")
CORRECTION = CorrectionSection(veto_low=0.0, veto_high=1e9)
LAYOUTS = {
    "padded": RowLayout(),
    "packed": RowLayout(packing=True),
    "shared": RowLayout(packing=True, share_prompts=True),
}


def make_policy(model_dir: Path, dtype: torch.dtype = torch.float32) -> PolicyModule:
    policy = PolicyModule(load_model(model_dir, dtype), 0.9)
    use_packed_attention(policy, SegmentPlan.of)
    return policy


def run(module: torch.nn.Module, layout: RowLayout, *, budget: int = 10**6, ranks: int = 1):
    """Loss, log-probs by rollout, and gradients, over the microbatches of all ranks."""
    batch, sums = make_batch(), DiagnosticSums()
    shares = plan_step(batch, CORRECTION, budget_tokens=budget, ranks=ranks, max_tokens=None, layout=layout)
    found: dict[int, torch.Tensor] = {}
    for micro in (micro for share in shares for update in share.updates for micro in update.microbatches):
        logprobs, entropy = module(*micro.model_inputs(CPU))
        microbatch_loss(micro, logprobs, entropy, CORRECTION, sums).backward()
        if micro.real:
            parts = logprobs.detach().split(micro.lengths.tolist())
            found |= dict(zip(micro.rollouts.tolist(), parts, strict=True))
    _, loss = sums.finish(total_mass=shares[0].updates[0].facts.total_mass)
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return loss, torch.cat([found[row] for row in sorted(found)]), gradients


def assert_same(a, b) -> None:
    assert a[0] == pytest.approx(b[0], abs=1e-6)
    torch.testing.assert_close(a[1], b[1], atol=1e-5, rtol=0)
    for name, gradient in a[2].items():
        assert float((gradient - b[2][name]).norm()) <= 1e-5 * float(b[2][name].norm()), name


@pytest.mark.parametrize("which", ["model_dir", "untied_model_dir", "moe_dir"])
def test_packed_and_shared_rows_give_the_log_probs_and_gradients_of_padded_ones(which, request):
    policy = make_policy(request.getfixturevalue(which))
    padded = run(policy, LAYOUTS["padded"])
    for layout in ("packed", "shared"):
        assert_same(run(policy, LAYOUTS[layout]), padded)


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize(("budget", "ranks"), [(24, 1), (40, 3), (10**6, 2), (10**6, 20)])
def test_how_rollouts_are_split_over_rows_and_ranks_does_not_change_the_gradient(model_dir, layout, budget, ranks):
    policy = make_policy(model_dir)
    assert_same(run(policy, LAYOUTS[layout], budget=budget, ranks=ranks), run(policy, LAYOUTS[layout]))


def test_masters_compute_packed_rows_with_the_rounded_weights(model_dir: Path):
    masters = MasterWeights(make_policy(model_dir), torch.bfloat16, torch.float32)
    served = make_policy(model_dir)
    with torch.no_grad():
        for mine, theirs in zip(masters.parameters(), served.parameters(), strict=True):
            mine.mul_(1 + 1e-3 * torch.randn_like(mine))  # off the bf16 grid
            theirs.copy_(mine.to(torch.bfloat16))
    ours, theirs = run(masters, LAYOUTS["shared"]), run(served, LAYOUTS["shared"])
    assert torch.equal(ours[1], theirs[1])
    for name, gradient in theirs[2].items():
        assert torch.equal(ours[2]["policy." + name], gradient)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_every_stage_is_that_of_padded_rows(engine, stage):
    outputs = {}
    for layout, keys in {
        "padded": {"packing": False}, "packed": {"share_prompts": False}, "shared": {},
        "recomputed": {"gradient_checkpointing": True},
    }.items():  # fmt: skip
        made = engine(zero_stage=stage, dtype="float32", **keys)
        outputs[layout] = [made.train_step(make_batch(range(4 * k, 4 * k + 4))) for k in range(2)]
    for layout in ("packed", "shared", "recomputed"):
        for ours, theirs in zip(outputs[layout], outputs["padded"], strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert outputs["shared"][0].loss == outputs["recomputed"][0].loss


def test_bf16_masters_under_a_step_round_otherwise_but_say_the_same(engine):
    losses = []
    for keys in ({"packing": False}, {}):
        losses.append(engine(dtype="bfloat16", compute_dtype="bfloat16", **keys).train_step(make_batch()).loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert np.isfinite(losses).all()
