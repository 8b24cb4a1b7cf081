import math

import pytest
import torch

from anabranch.kernels.diagnostics import Diagnostics, DiagnosticSums
from anabranch.learner.gates import judge, non_finite, strongest
from anabranch.schemas.config import GateSection
from tests.unit.kernels.token_samples import tokens


def diagnostics(d: list[float], lags: list[int] | None = None, lengths: list[int] | None = None) -> Diagnostics:
    behaviour = torch.full((len(d),), -1.0, dtype=torch.float64)
    ell = behaviour + torch.tensor(d, dtype=torch.float64)
    sums = DiagnosticSums()
    sums.add(
        tokens(ell, behaviour, lags=lags, advantages=[1.0] * len(lengths or [0]), lengths=lengths),
        kept=torch.ones(len(d)).bool(), weights=torch.ones(len(lengths or [0]), dtype=torch.float64),
        entropy=torch.zeros(len(d)), loss=torch.tensor(0.0),
    )  # fmt: skip
    return sums.finish(total_mass=float(len(d)))[0]


def test_a_step_of_equal_policies_passes_all_gates():
    assert judge(diagnostics([0.0, 0.0]), GateSection()) == []
    assert strongest([]) == "pass"


def test_engine_mismatch_is_judged_on_tokens_of_age_0_alone():
    gates = GateSection(mismatch_action="skip")
    assert judge(diagnostics([0.3, 0.3], lags=[1, 2]), gates) == []
    (alarm,) = judge(diagnostics([0.3, 0.3], lags=[0, 2]), gates)
    assert (alarm.gate, alarm.action) == ("kl_k3_same_version", "skip")
    assert str(alarm) == "kl_k3_same_version = 0.04986, above gates.mismatch_k3 = 0.001"


def test_a_few_tokens_that_carry_the_batch_are_an_alarm():
    (alarm,) = judge(diagnostics([0.0] * 20 + [3.0], lags=[1] * 21), GateSection(ratio_mean_high=5.0))
    assert alarm.gate == "ess_token"
    assert "below gates.ess = 0.3" in str(alarm)


def test_a_few_trajectories_that_carry_the_batch_are_an_alarm_of_their_own():
    """Small drift of many tokens: no token stands out, but one trajectory of five has a ratio of e^4."""
    drift = diagnostics([0.1] * 40 + [0.0] * 160, lags=[1] * 200, lengths=[40] * 5)
    (alarm,) = judge(drift, GateSection(ess_sequence_action="skip", ess_action="stop"))
    assert (alarm.gate, alarm.action, alarm.bound) == ("ess_sequence", "skip", "below gates.ess_sequence = 0.3")
    assert judge(drift, GateSection(ess_sequence=0.2)) == []
    assert judge(drift, GateSection(ess_sequence_action="off")) == []


@pytest.mark.parametrize(
    ("d", "said"), [(-1.0, "below gates.ratio_mean_low = 0.5"), (1.0, "above gates.ratio_mean_high")]
)
def test_a_mean_ratio_far_from_one_is_an_alarm(d, said):
    (alarm,) = judge(diagnostics([d], lags=[1]), GateSection(ratio_mean_action="stop"))
    assert said in str(alarm)
    assert strongest([alarm]) == "stop"


def test_a_gate_that_is_off_lets_everything_through():
    off = GateSection(mismatch_action="off", ess_action="off", ess_sequence_action="off", ratio_mean_action="off")
    assert judge(diagnostics([3.0, -9.0, 0.0]), off) == []


def test_a_figure_that_is_no_number_passes_no_gate():
    assert {a.gate: a.bound for a in judge(diagnostics([math.nan]), GateSection())} == {
        "kl_k3_same_version": "not finite", "ess_token": "not finite", "ess_sequence": "not finite",
        "ratio_mean": "not finite",
    }  # fmt: skip


def test_the_bound_named_is_the_key_that_is_set():
    (alarm,) = judge(diagnostics([1.0], lags=[1]), GateSection(ratio_mean_low=0.0))
    assert alarm.bound == "above gates.ratio_mean_high = 2.0"


def test_nothing_forwarded_passes():
    assert judge(DiagnosticSums().finish(total_mass=1.0)[0], GateSection()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_finite_number(value):
    (alarm,) = non_finite("loss", value, GateSection(non_finite_action="skip"))
    assert (alarm.action, alarm.bound) == ("skip", "not finite")
    assert non_finite("loss", 1.0, GateSection()) == []
