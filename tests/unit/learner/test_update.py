"""Updates, gates and looking ahead, with a real engine."""

import math

import numpy as np
import pytest

from anabranch.learner import update
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.step import microbatch_loss
from anabranch.schemas.config import CorrectionSection, GateSection
from anabranch.schemas.errors import GateError
from tests.unit.learner.conftest import make_batch

SKIP = GateSection(
    ess=1.0, ess_action="skip", ess_sequence_action="off", mismatch_action="off", ratio_mean_action="off"
)
NO_VETO = {"veto_low": 0.0, "veto_high": 1e9}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize(
    ("stage", "dtype", "compute"),
    [(0, "bfloat16", "float32"), (1, "bfloat16", "bfloat16"), (1, "bfloat16", "float32"), (2, "bfloat16", "bfloat16"),
     (2, "float32", "float32"), (3, "bfloat16", "bfloat16"), (3, "float32", "float32")],
)  # fmt: skip
@pytest.mark.parametrize("first", [True, False], ids=["in the first step", "later"])
def test_a_skipped_step_changes_no_bit_of_weights_and_optimizer_and_the_next_goes_on(
    engine, stage, dtype, compute, first
):
    how = {"zero_stage": stage, "dtype": dtype, "compute_dtype": compute}
    skipping, plain = engine(gates=SKIP, **how), engine(**how)
    if not first:
        with _open(skipping):
            skipping.train_step(make_batch([6, 7]))
        plain.train_step(make_batch([6, 7]))
    before = skipping.state_bits()
    output = skipping.train_step(make_batch([0, 1]))
    assert output.skipped_groups == (0, 1)
    assert [alarm.gate for alarm in output.alarms] == ["ess_token"]
    assert skipping.step == output.step == plain.step + 1
    assert same(skipping.state_bits(), before)
    with _open(skipping):
        after = skipping.train_step(make_batch([2, 3]))
    expected = plain.train_step(make_batch([2, 3]))
    assert (after.loss, after.grad_norm) == (expected.loss, expected.grad_norm)
    assert after.skipped_groups == ()
    assert same(skipping.state_bits(), plain.state_bits()), "moments and counters are those of a run without that step"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_loss_that_is_not_finite_never_reaches_the_weights(engine, stage, action):
    made = engine(zero_stage=stage, gates=GateSection(non_finite_action=action))
    batch, before = make_batch(), made.state_bits()
    batch.behaviour[0, 0] = np.nan
    if action == "stop":
        with pytest.raises(GateError, match=r"step 1, groups 0\.\.3: .*loss = nan, not finite"):
            made.train_step(batch)
        assert made.step == 0
    else:
        assert made.train_step(batch).skipped_groups == (0, 1, 2, 3)
        assert made.step == 1
    assert same(made.state_bits(), before)
    assert made.train_step(make_batch([4, 5])).skipped_groups == ()
    assert not same(made.state_bits(), before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(engine, stage, monkeypatch):
    """The loss is finite: only the norm, after the backward pass, can tell."""
    made = engine(zero_stage=stage, gates=GateSection(non_finite_action="skip"))

    def steep(micro, logprobs, *args, **kwargs):
        return microbatch_loss(micro, logprobs, *args, **kwargs) + (0.0 * logprobs.sum()).sqrt()

    before = made.state_bits()
    with monkeypatch.context() as patched:
        patched.setattr(update, "microbatch_loss", steep)
        output = made.train_step(make_batch())
    assert math.isfinite(output.loss)
    assert "grad_norm" in [alarm.gate for alarm in output.alarms]
    assert output.skipped_groups == (0, 1, 2, 3)
    assert same(made.state_bits(), before)
    assert made.train_step(make_batch([4, 5])).skipped_groups == ()
    assert not same(made.state_bits(), before)


def test_drift_is_judged_until_an_update_of_the_step_went_through(engine):
    """What the second update sees is not the step's own doing if the first one changed nothing."""
    made = engine(gates=SKIP, updates_per_step=2)
    before = made.state_bits()
    assert made.train_step(make_batch(range(4))).skipped_groups == (0, 1, 2, 3)
    assert same(made.state_bits(), before)


def test_drift_is_not_judged_after_an_update_that_went_through(engine, monkeypatch):
    judged = []
    monkeypatch.setattr(update, "judge", lambda *_: judged.append(1) or [])
    engine(gates=SKIP, updates_per_step=3).train_step(make_batch(range(4)))
    assert len(judged) == 1


def test_more_updates_than_groups_are_as_many_as_groups(engine):
    made, same_as = engine(updates_per_step=9), engine(updates_per_step=2)
    made.train_step(make_batch([0, 1]))
    same_as.train_step(make_batch([0, 1]))
    assert same(made.state_bits(), same_as.state_bits())


@pytest.mark.parametrize("objective", ["dppo_tv", "m2po"])
def test_a_batch_without_gradient_passes_every_gate(engine, objective):
    strict = GateSection(ess=1.0, ess_action="stop", ess_sequence=1.0, ess_sequence_action="stop")
    made = engine(gates=strict, correction=CorrectionSection(objective=objective))
    output = made.train_step(make_batch(reward=lambda _: 1.0))
    assert (output.loss, output.grad_norm, output.diagnostics.total) == (0.0, 0.0, None)
    assert (output.zero_variance_groups, output.skipped_groups, output.alarms) == ((0, 1, 2, 3), (), ())


def test_m2po_that_selects_nothing_has_no_gradient(engine):
    made = engine(correction=CorrectionSection(objective="m2po", tau=1e-30, **NO_VETO))
    output = made.train_step(make_batch())
    assert (output.loss, output.grad_norm, output.diagnostics.total.masked_fraction) == (0.0, 0.0, 1.0)


def test_a_gate_that_says_stop_names_figure_and_bound(engine):
    made = engine(gates=GateSection(ess=1.0, ess_action="stop", ratio_mean_action="off"))
    with pytest.raises(GateError, match=r"step 1, groups 0\.\.3: ess_token = .*, below gates\.ess = 1\.0"):
        made.train_step(make_batch())


def test_several_updates_of_a_step_are_steps_on_its_parts(engine):
    """With advantages that belong to groups, k updates equal k steps of a learner that gets the parts one by one."""
    correction = CorrectionSection(objective="ppo", **NO_VETO)
    once, apart = engine(correction=correction, updates_per_step=2), engine(correction=correction)
    batch = make_batch(range(4))
    output = once.train_step(batch)
    first = apart.train_step(make_batch([0, 1]))
    apart.train_step(make_batch([2, 3]))
    assert (output.step, output.groups, output.loss) == (1, 4, first.loss)
    assert same(once.state_bits(), apart.state_bits())


def test_the_proximal_policy_is_the_one_before_the_steps_first_update(engine, monkeypatch):
    """`decoupled` with two updates: the second one's ratio to the proximal policy is no longer 1."""
    seen: list[tuple] = []
    tokens = MicroBatch.tokens

    def spy(micro, logprobs, proximal=None, selected=None):
        seen.append((logprobs.detach().clone(), None if proximal is None else proximal.clone()))
        return tokens(micro, logprobs, proximal, selected)

    monkeypatch.setattr(MicroBatch, "tokens", spy)
    made = engine(correction=CorrectionSection(objective="decoupled", **NO_VETO), updates_per_step=2, dtype="float32")
    made.train_step(make_batch(range(4)))
    updates = [(ell - proximal).abs().max().item() for ell, proximal in seen]
    half = len(updates) // 2
    assert max(updates[:half]) < 1e-5
    assert max(updates[half:]) > 1e-3


def test_what_m2po_selects_does_not_depend_on_the_microbatches(engine):
    correction = CorrectionSection(objective="m2po", **NO_VETO)
    small, large = (engine(correction=correction, micro_batch_tokens=n, dtype="float32") for n in (20, 10**6))
    a, b = small.train_step(make_batch()), large.train_step(make_batch())
    assert 0 < a.diagnostics.total.masked_fraction < 1
    assert a.diagnostics.total.masked_fraction == pytest.approx(b.diagnostics.total.masked_fraction)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)


class _open:
    """Lets everything through the gates of `engine` for a while."""

    def __init__(self, engine: LearnerEngine) -> None:
        self._updater = engine._updater

    def __enter__(self) -> None:
        self._gates = self._updater._gates
        self._updater._gates = replace_gates(self._gates)

    def __exit__(self, *_: object) -> None:
        self._updater._gates = self._gates


def replace_gates(gates: GateSection) -> GateSection:
    return gates.model_copy(update={"ess_action": "off"})
