"""`[correction]` and `[gates]`: what the loss does about policy age, and what it takes to stop. Held by
tests/unit/schemas/test_correction_config.py."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from anabranch.schemas.config.section import Section

Objective = Literal[
    "none", "ppo", "grpo", "dr_grpo", "decoupled", "a3po", "tis", "icepop", "seq_mis", "cispo", "aipo", "dppo_tv", "dppo_kl",
    "gspo", "m2po", "opsm", "topr",
]  # fmt: skip
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "opo", "maxrl"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
GateAction = Literal["off", "warn", "skip", "stop"]

# What an objective's paper pairs it with: used for the keys that the user leaves out (sources: docs/staleness.md).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dppo_tv": {"penalty": 1e-3, "tau": 0.2, "ratio_cap": 20.0},
    "dppo_kl": {"tau": 0.05, "ratio_cap": 20.0},
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean"},
    "dr_grpo": {"aggregation": "constant"},
    "decoupled": {"clip_high": 0.2, "ratio_cap": 5.0},
    "a3po": {"clip_high": 0.2, "ratio_cap": 5.0},
    "tis": {"ratio_cap": 2.0},
    "icepop": {"band_low": 0.5, "band_high": 5.0},
    "cispo": {"ratio_cap": 6.0},
    "aipo": {"ratio_cap": 2.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "m2po": {"tau": 0.04},
}
_SEQUENCE_TIS_CAP = 5.0
_WITHOUT_TRUST_REGION = ("none", "tis", "icepop", "seq_mis", "cispo", "aipo", "topr")


class CorrectionSection(Section):
    """Off-policy correction, see docs/staleness.md. Defaults that depend on the objective are in its table there."""

    objective: Objective = "dppo_tv"
    max_age: int = Field(
        8, ge=0, description="hard bound: a group with an older token never reaches the loss; 0 is synchronous"
    )
    advantage: Advantage = "dr_grpo"
    aggregation: Aggregation = "token_mean"
    clip_low: float = Field(0.2, gt=0, lt=1, description="ppo, grpo, dr_grpo, decoupled, a3po, gspo, opsm: lower clip")
    clip_high: float = Field(0.28, gt=0, description="the same: upper clip; default 0.2 for decoupled and a3po")
    tau: float = Field(
        0.2, gt=0, description="dppo_tv: bound on the probability difference; dppo_kl: on the KL; m2po: on the mean d²"
    )
    ratio_cap: float = Field(
        20.0, gt=0, description="cap of the importance ratio: dppo_tv, dppo_kl, seq_mis 20; decoupled, a3po 5; tis 2 (of a "
        "sequence 5); cispo 6; aipo 2",
    )  # fmt: skip
    ratio_level: Literal["token", "sequence"] = Field(
        "token", description="tis, topr: the ratio of a token or of its trajectory"
    )
    band_low: float = Field(
        0.5, ge=0, description="icepop: tokens with a smaller ratio are masked; seq_mis: trajectories"
    )
    band_high: float = Field(2.0, gt=0, description="the same, with a larger ratio; default 5 for icepop")
    band_widening: float = Field(
        0.1, ge=0, description="seq_mis: the band is [low/(1 + w·lag), high·(1 + w·lag)] at a trajectory's mean lag"
    )
    sequence_ratio: Literal["product", "geometric"] = Field(
        "geometric", description="seq_mis: the ratio of a trajectory is exp(Σd) or exp(Σd/T)"
    )
    opsm_delta: float = Field(
        0.1, ge=0, description="opsm: a trajectory with A < 0 and a larger mean b − ℓ is out of the loss"
    )
    penalty: float = Field(1e-3, ge=0, description="weight of the penalty; default 0 for objectives other than dppo_tv")
    penalty_kind: Literal["d2", "k3", "k1"] = Field(
        "d2", description="d2: −c·d² and k3: −c·(r − 1 − d), in the loss; k1: A − c·d, as if it were part of the reward"
    )
    veto_low: float = Field(1e-4, ge=0, description="a trajectory with any ratio below is dropped from the loss")
    veto_high: float = Field(100.0, gt=1, description="a trajectory with any ratio above is dropped from the loss")
    narrow_with_age: bool = Field(
        False,
        description="the trust region (clip_low, clip_high, tau) shrinks to ε/(1 + κ·max(0, lag − from)); not for objectives "
        "without one",
    )
    narrow_rate: float = Field(0.1, ge=0, description="κ")
    narrow_from: int = Field(0, ge=0, description="the lag up to which the trust region is whole")
    age_weight: float = Field(1.0, gt=0, le=1, description="γ: a token weighs γ^lag; 1 is off")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        objective = str(values.get("objective", "dppo_tv"))
        defaults = {"penalty": 0.0} | _DEFAULTS.get(objective, {})
        if objective == "tis" and values.get("ratio_level") == "sequence":
            defaults["ratio_cap"] = _SEQUENCE_TIS_CAP
        return defaults | values

    @model_validator(mode="after")
    def _bands_are_bands(self) -> Self:
        for low, high in (("band_low", "band_high"), ("veto_low", "veto_high")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"correction.{low} = {getattr(self, low)} must lie below correction.{high} = {getattr(self, high)}"
                )
        return self

    @model_validator(mode="after")
    def _a_region_that_narrows_exists(self) -> Self:
        if self.narrow_with_age and self.objective in _WITHOUT_TRUST_REGION:
            raise ValueError(
                f"correction.narrow_with_age has nothing to narrow: correction.objective = {self.objective} has no trust region"
            )
        return self


class GateSection(Section):
    """Bounds on a step's diagnostics. `warn`: log and note it; `skip`: the step changes no weight, its groups count as
    dropped:gate; `stop`: the learner ends, naming the figure, before the optimizer's step. See docs/staleness.md."""

    mismatch_k3: float = Field(
        1e-3, gt=0, description="largest k3 over tokens of age 0: there engine and learner differ"
    )
    mismatch_action: GateAction = "warn"
    ess: float = Field(0.3, ge=0, le=1, description="smallest effective sample size of the token ratios")
    ess_action: GateAction = "warn"
    ess_sequence: float = Field(
        0.3, ge=0, le=1, description="smallest effective sample size of the trajectories' ratios"
    )
    ess_sequence_action: GateAction = "warn"
    ratio_mean_low: float = Field(0.5, ge=0, description="smallest mean ratio")
    ratio_mean_high: float = Field(2.0, gt=1, description="largest mean ratio")
    ratio_mean_action: GateAction = "warn"
    non_finite_action: Literal["skip", "stop"] = Field(
        "stop", description="a loss or gradient that is no finite number"
    )

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> Self:
        if not self.ratio_mean_low < self.ratio_mean_high:
            raise ValueError(
                f"gates.ratio_mean_low = {self.ratio_mean_low} must lie below gates.ratio_mean_high = {self.ratio_mean_high}"
            )
        return self
