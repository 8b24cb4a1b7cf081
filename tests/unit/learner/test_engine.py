"""Real DeepSpeed on a tiny Qwen3, one rank. Several ranks: tests/e2e/test_learner_engine.py."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.learner.batch import build_batch
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.policy import PolicyModule, load_model
from anabranch.learner.step import microbatch_loss, plan_step
from anabranch.schemas.config import CorrectionSection, LearnerSection
from anabranch.schemas.errors import ConfigError
from anabranch.schemas.trajectory import Group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.unit.learner.conftest import NOW, VOCAB, make_batch, make_group

NO_VETO = CorrectionSection(veto_low=0.0, veto_high=1e9)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def values(bits: dict) -> np.ndarray:
    """All weights as float64 (bf16 is the upper half of float32)."""
    flat = np.concatenate([bits[name] for name in sorted(bits)])
    wide = flat.astype(np.uint32) << 16 if flat.dtype == np.uint16 else flat
    return wide.view(np.float32).astype(np.float64)


def reference_run(model_dir: Path, batches: list, *, dtype: torch.dtype, compute: torch.dtype, lr: float) -> np.ndarray:
    """The same steps in plain torch: float32 masters, float32 gradient sums, AdamW; returns the rounded weights."""
    policy = PolicyModule(load_model(model_dir, compute), 1.0)
    start = load_model(model_dir, dtype).float()
    masters = {name: p.detach().clone().requires_grad_() for name, p in start.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    served = dict(policy.lm.named_parameters())
    for batch in batches:
        (share,) = plan_step(batch, NO_VETO, budget_tokens=64, ranks=1, max_tokens=None)
        for p in masters.values():
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            for name, p in served.items():
                p.copy_(masters[name].to(dtype))
        for micro in share.updates[0].microbatches:
            logprobs, entropy = policy(*micro.model_inputs(torch.device("cpu")))
            microbatch_loss(micro, logprobs, entropy, NO_VETO, DiagnosticSums()).backward()
            for name, p in served.items():
                masters[name].grad += p.grad.float()
                p.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
    return np.concatenate([masters[n].detach().to(dtype).double().numpy().reshape(-1) for n in sorted(masters)])


@pytest.mark.parametrize(
    ("stage", "dtype", "compute"),
    [
        *((stage, "bfloat16", "bfloat16") for stage in range(4)),
        *((stage, "bfloat16", "float32") for stage in range(3)),  # stage 3: refused, see test_deepspeed_config.py
        *((stage, "float32", "float32") for stage in range(4)),
    ],
)
def test_every_stage_and_dtype_is_adamw_on_float32_masters(engine, model_dir: Path, stage, dtype, compute):
    batches = [make_batch([0, 1]), make_batch([2, 3]), make_batch([4, 5])]
    # Padded, as the reference: packing rounds otherwise. What it computes: test_packed_steps.py.
    made = engine(zero_stage=stage, dtype=dtype, compute_dtype=compute, packing=False)
    start = values(made.state_bits())
    for batch in batches:
        made.train_step(batch)
    expected = reference_run(model_dir, batches, dtype=getattr(torch, dtype), compute=getattr(torch, compute), lr=1e-3)
    got = values(made.state_bits())
    assert np.abs(got - start).max() > 1e-3
    if dtype == "bfloat16":
        # The norm is summed in another order, which can tip a master across a rounding boundary now and then.
        assert (got != expected).mean() < 1e-3
        np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=0)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lr_zero_leaves_every_bit(engine, stage):
    made = engine(zero_stage=stage, lr=0.0)
    before = made.state_bits()
    for k in range(3):
        assert made.train_step(make_batch([2 * k, 2 * k + 1])).grad_norm > 0
    assert same(made.state_bits(), before)


def test_lr_zero_leaves_every_bit_of_a_model_with_negative_zeros_too(engine, tmp_path: Path, model_dir: Path):
    lm = load_model(model_dir, torch.bfloat16)
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.weight.fill_(-0.0)
    lm.save_pretrained(tmp_path)
    made = engine(model_dir=tmp_path, lr=0.0)
    before = made.state_bits()
    made.train_step(make_batch())
    assert same(made.state_bits(), before)


def test_the_same_groups_give_the_same_bits_however_they_arrive(engine):
    groups = [make_group(i) for i in range(4)]
    shuffled = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
    made = [engine(), engine()]
    for e, order in zip(made, (groups, shuffled), strict=True):
        for _ in range(2):
            output = e.train_step(build_batch(order, now=NOW, forks={}, max_age=8))
    assert output.step == 2
    assert same(made[0].state_bits(), made[1].state_bits())


def test_the_microbatch_budget_does_not_change_the_step(engine):
    small, large = engine(micro_batch_tokens=20, dtype="float32"), engine(micro_batch_tokens=10**6, dtype="float32")
    a, b = small.train_step(make_batch()), large.train_step(make_batch())
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    assert np.abs(values(small.state_bits()) - values(large.state_bits())).max() < 1e-4


def test_at_lag_zero_ratios_are_one_and_nothing_is_masked(engine, model_dir: Path):
    made = engine(temperature=0.8, correction=CorrectionSection())
    policy = PolicyModule(load_model(model_dir, torch.bfloat16).float(), 0.8)
    groups = [_as_sampled_by(policy, make_group(i)) for i in range(3)]
    d = made.train_step(build_batch(groups, now=NOW, forks={}, max_age=0)).diagnostics
    assert d.total.ratio_max == pytest.approx(1, abs=1e-5)
    assert d.same_version.kl_k3 == pytest.approx(0, abs=1e-9)
    assert d.total.masked_fraction == 0
    assert d.total.ess_token == pytest.approx(1)
    assert 0 < d.total.entropy < math.log(64)


@torch.no_grad()
def _as_sampled_by(policy: PolicyModule, group: Group) -> Group:
    """`group` with the log-probs that `policy` gives its tokens, all of the present version."""
    rollouts = []
    for rollout in group.rollouts:
        ids = torch.from_numpy(np.concatenate([group.prompt_token_ids, rollout.token_ids]).astype(np.int64))[None]
        places = torch.arange(len(group.prompt_token_ids) - 1, ids.shape[1] - 1)
        one_row = torch.empty((0, 3), dtype=torch.int64)
        logprobs, _ = policy(ids, torch.arange(ids.shape[1])[None], one_row, places, ids[0, places + 1])
        rollouts.append(replace(rollout, logprobs=logprobs.numpy(), spans=(VersionSpan(NOW, 0),)))
    return replace(group, rollouts=tuple(rollouts))


def test_dropout_is_off(engine, tmp_path: Path, model_dir: Path):
    lm = load_model(model_dir, torch.bfloat16)
    lm.config.attention_dropout = 0.5
    lm.save_pretrained(tmp_path)
    assert load_model(tmp_path, torch.bfloat16).config.attention_dropout == 0.5
    expected, made = engine(lr=0.0), engine(lr=0.0, model_dir=tmp_path)
    assert made.train_step(make_batch()).loss == expected.train_step(make_batch()).loss


def test_a_batch_without_advantage_changes_nothing_on_a_fresh_engine(engine):
    made = engine()
    before = made.state_bits()
    output = made.train_step(make_batch(reward=lambda s: 1.0))
    assert (output.loss, output.grad_norm, output.zero_advantage_fraction) == (0.0, 0.0, 1.0)
    assert output.zero_variance_groups == (0, 1, 2, 3)
    assert output.step == made.step == 1
    assert same(made.state_bits(), before)


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before_it(engine):
    norms = {}
    for stage in (0, 1):
        norms[stage] = engine(zero_stage=stage, grad_clip=1e-3).train_step(make_batch()).grad_norm
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert engine(zero_stage=0, grad_clip=0.0).train_step(make_batch()).grad_norm == pytest.approx(norms[0])


def test_layout_names_what_state_bits_holds(engine, model_dir: Path):
    made = engine(zero_stage=3)
    bits = made.state_bits()
    assert {t.name: t.numel for t in made.layout.tensors} == {name: b.size for name, b in bits.items()}
    assert "lm_head.weight" not in bits  # tied: once, under the embedding's name
    assert {b.dtype for b in bits.values()} == {np.dtype(np.uint16)}
    assert {b.dtype for b in engine(dtype="float32").state_bits().values()} == {np.dtype(np.uint32)}


def test_dr_grpo_needs_its_constant_length(engine):
    with pytest.raises(ConfigError, match="longest completion"):
        engine(correction=CorrectionSection(objective="dr_grpo"))
    output = engine(correction=CorrectionSection(objective="dr_grpo"), max_tokens=9).train_step(make_batch())
    assert math.isfinite(output.loss)


def test_a_wrong_number_of_ranks_is_refused(engine):
    with pytest.raises(ConfigError, match=r"learner\.world_size = 2, but 1 ranks were started"):
        engine(world_size=2)


def test_older_policies_are_allowed_up_to_the_bound(engine):
    batch = build_batch([make_group(0)], now=PolicyVersion(0, 10), forks={}, max_age=10)
    assert engine().train_step(batch).diagnostics.same_version is None


def test_the_vocabulary_is_that_of_the_embedding(engine):
    assert engine().vocabulary == VOCAB


def test_a_rank_waits_for_rank_0_longer_than_rank_0_waits_for_an_evaluation(engine, monkeypatch):
    class Asked(Exception):
        pass

    def init_ranks(*_: object, deadline_s: float, **__: object) -> None:
        raise Asked(deadline_s)

    monkeypatch.setattr("anabranch.learner.engine.init_ranks", init_ranks)
    with pytest.raises(Asked) as asked:
        engine(evaluate_deadline_s=7200.0)
    assert asked.value.args[0] > 7200


def test_a_step_says_that_it_lives_before_every_microbatch(model_dir: Path):
    beats: list[int] = []
    section = LearnerSection(lr=1e-3, micro_batch_tokens=64)
    engine = LearnerEngine(model_dir, section, NO_VETO, run_seed=0, temperature=1.0, heartbeat=lambda: beats.append(1))
    batch = make_batch()
    engine.train_step(batch)
    microbatches = engine.plan(batch)[0].updates[0].microbatches
    assert len(beats) >= len(microbatches) > 1
