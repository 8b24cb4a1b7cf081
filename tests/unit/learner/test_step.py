"""The arithmetic of a step, with a bigram table in the place of the model."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.step import StepShare, microbatch_loss, plan_step
from anabranch.schemas.config import CorrectionSection
from tests.unit.learner.conftest import VOCAB, make_batch

CPU = torch.device("cpu")
CORRECTION = CorrectionSection(veto_low=0.0, veto_high=1e9)


def table() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(VOCAB, VOCAB, generator=g, dtype=torch.float32).requires_grad_()


def run(
    batch, *, budget: int, ranks: int = 1, correction: CorrectionSection = CORRECTION, max_tokens: int | None = None
):
    """Loss, gradient to the table, and diagnostics, summed over the microbatches of all ranks."""
    weights = table()
    plan = plan_step(batch, correction, budget_tokens=budget, ranks=ranks, max_tokens=max_tokens)
    sums = DiagnosticSums()
    for share in plan:
        for micro in share.updates[0].microbatches:
            input_ids, _, _, predecessors, targets = micro.model_inputs(CPU)
            log_p = torch.log_softmax(weights[input_ids.flatten()[predecessors]], dim=-1)
            logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
            entropy = -(log_p.exp() * log_p).sum(-1).detach()
            microbatch_loss(micro, logprobs, entropy, correction, sums).backward()
    diagnostics, loss = sums.finish(total_mass=plan[0].updates[0].facts.total_mass)
    return loss, weights.grad, diagnostics


def plain_policy_gradient_loss(batch, weights: torch.Tensor) -> torch.Tensor:
    """−Σ A·ℓ / Σ T for objective "none", rollout by rollout, straight from the definition."""
    total = torch.zeros(())
    for row in range(len(batch.rewards)):
        members = batch.rewards[batch.group == batch.group[row]]
        advantage = float(batch.rewards[row] - members.mean())
        start, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = torch.from_numpy(batch.token_ids[row, : start + length])
        log_p = torch.log_softmax(weights[ids[start - 1 : -1]], dim=-1)
        total = total - advantage * log_p.gather(1, ids[start:, None]).sum()
    return total / batch.tokens


def test_a_step_is_its_definition():
    batch, weights = make_batch(), table()
    expected = plain_policy_gradient_loss(batch, weights)
    expected.backward()
    correction = CorrectionSection(objective="none", veto_low=0.0, veto_high=1e9)
    loss, grad, _ = run(batch, budget=64, correction=correction)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(grad, weights.grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    "correction",
    [CORRECTION, *(CorrectionSection(objective=o, veto_low=0.0, veto_high=1e9) for o in ("grpo", "dr_grpo"))],
    ids=lambda c: c.objective,
)
@pytest.mark.parametrize(("budget", "ranks"), [(16, 1), (64, 2), (48, 3), (10**6, 1), (10**6, 7)])
def test_how_a_batch_is_split_does_not_change_its_gradient(correction, budget, ranks):
    batch = make_batch()
    loss, grad, diagnostics = run(batch, budget=40, correction=correction, max_tokens=10)
    other_loss, other_grad, other_diagnostics = run(
        batch, budget=budget, ranks=ranks, correction=correction, max_tokens=10
    )
    assert other_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(other_grad, grad, atol=1e-7, rtol=1e-4)
    assert other_diagnostics.total.kl_k3 == pytest.approx(diagnostics.total.kl_k3, rel=1e-5)
    assert other_diagnostics.total.kept_mass == pytest.approx(diagnostics.total.kept_mass, rel=1e-5)
    assert other_diagnostics.total.tokens == diagnostics.total.tokens


def test_groups_of_equal_rewards_skip_the_forward_pass_and_keep_their_place_in_the_denominator():
    scored = make_batch([0, 2])
    mixed = make_batch([0, 1, 2], reward=None)
    flat = mixed.group == 1
    mixed.rewards[flat] = 1.0
    plan = plan_step(mixed, CORRECTION, budget_tokens=64, ranks=1, max_tokens=None)
    assert plan[0].updates[0].facts.zero_variance_groups == (1,)
    forwarded = sorted(row for micro in plan[0].updates[0].microbatches for row in micro.rollouts.tolist())
    assert forwarded == [row for row in range(len(flat)) if not flat[row]]
    _, grad, diagnostics = run(mixed, budget=64)
    _, alone, _ = run(scored, budget=64)
    torch.testing.assert_close(grad, alone * (scored.tokens / mixed.tokens), atol=1e-8, rtol=1e-5)
    assert diagnostics.total.tokens == scored.tokens
    assert diagnostics.total.kept_mass == pytest.approx(
        scored.tokens / mixed.tokens, rel=1e-5
    )  # nothing else is masked


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_of_equal_rewards_throughout_is_a_step_with_zero_gradient(ranks):
    loss, grad, diagnostics = run(make_batch(reward=lambda s: 1.0), budget=64, ranks=ranks)
    assert loss == 0
    assert (grad == 0).all()
    assert diagnostics.total is None


def microbatches(share: StepShare) -> list[MicroBatch]:
    return [micro for update in share.updates for micro in update.microbatches]


def test_a_share_survives_the_way_to_its_rank_and_says_no_more_than_its_own():
    batch = make_batch()
    shares = plan_step(batch, CORRECTION, budget_tokens=48, ranks=3, max_tokens=None, updates=2)
    rows = [row for share in shares for micro in microbatches(share) if micro.real for row in micro.rollouts.tolist()]
    assert sorted(rows) == list(range(len(batch.rewards)))
    for share in shares:
        there = StepShare.from_bytes(share.to_bytes())
        assert [update.facts for update in there.updates] == [update.facts for update in share.updates]
        for a, b in zip(microbatches(there), microbatches(share), strict=True):
            for field in fields(a):
                np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


@pytest.mark.parametrize(
    ("updates", "parts"), [(1, [(0, 1, 2, 3, 4)]), (2, [(0, 1, 2), (3, 4)]), (9, [(0,), (1,), (2,), (3,), (4,)])]
)
def test_groups_are_split_evenly_over_updates_by_index_and_each_has_its_own_denominator(updates, parts):
    batch = make_batch(range(5))
    (share,) = plan_step(batch, CORRECTION, budget_tokens=10**6, ranks=1, max_tokens=None, updates=updates)
    assert [update.facts.group_indices for update in share.updates] == parts
    for update, members in zip(share.updates, parts, strict=True):
        tokens = sum(int(n) for n, g in zip(batch.lengths, batch.group, strict=True) if g in members)
        assert update.facts.total_mass == pytest.approx(1.0)
        assert np.concatenate([m.weights for m in update.microbatches]).tolist() == pytest.approx(
            [1 / tokens] * 4 * len(members)
        )
