import pytest

from anabranch.schemas.config import CorrectionSection, load_config
from anabranch.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("dppo_tv", {"penalty": 1e-3, "tau": 0.2, "ratio_cap": 20.0, "aggregation": "token_mean"}),
        ("dppo_kl", {"penalty": 0.0, "tau": 0.05, "ratio_cap": 20.0}),
        ("grpo", {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "clip_high": 0.28}),
        ("decoupled", {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 5.0}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("icepop", {"band_low": 0.5, "band_high": 5.0}),
        ("m2po", {"tau": 0.04}),
    ],
)
def test_an_objective_brings_its_own_defaults(objective, expected):
    section = CorrectionSection(objective=objective)
    assert {key: getattr(section, key) for key in expected} == expected


def test_what_the_user_says_goes_before_the_objectives_defaults():
    assert CorrectionSection(objective="dppo_kl", tau=0.5).tau == 0.5


def test_the_cap_of_tis_depends_on_its_level():
    assert CorrectionSection(objective="tis").ratio_cap == 2.0
    assert CorrectionSection(objective="tis", ratio_level="sequence").ratio_cap == 5.0


def test_a_band_the_wrong_way_round_is_refused():
    with pytest.raises(ConfigError, match=r"correction\.band_low = 3\.0 must lie below correction\.band_high = 2\.0"):
        load_config("[correction]\nobjective = 'seq_mis'\nband_low = 3.0\n")


@pytest.mark.parametrize("objective", ["none", "tis", "icepop", "seq_mis", "cispo", "aipo", "topr"])
def test_a_trust_region_that_is_not_there_cannot_narrow(objective):
    with pytest.raises(
        ConfigError, match=rf"nothing to narrow: correction\.objective = {objective} has no trust region"
    ):
        load_config(f"[correction]\nobjective = '{objective}'\nnarrow_with_age = true\n")


@pytest.mark.parametrize(
    "objective", ["ppo", "grpo", "dr_grpo", "decoupled", "a3po", "gspo", "opsm", "dppo_tv", "dppo_kl", "m2po"]
)
def test_any_trust_region_can_narrow(objective):
    assert CorrectionSection(objective=objective, narrow_with_age=True).narrow_with_age


@pytest.mark.parametrize("low", [2.0, 3.0])
def test_bounds_of_a_gate_the_wrong_way_round_are_refused(low):
    with pytest.raises(
        ConfigError, match=rf"gates\.ratio_mean_low = {low} must lie below gates\.ratio_mean_high = 2\.0"
    ):
        load_config(f"[gates]\nratio_mean_low = {low}\n")
