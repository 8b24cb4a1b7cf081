"""A configuration that the learner could not run is refused when it is read, not when the learner starts."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.schemas.config import LearnerSection, load_config
from anabranch.schemas.config.learner_rules import OWNED
from anabranch.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "learner: float16 needs loss scaling"),
        ({"compute_dtype": "float16"}, "learner: float16 needs loss scaling"),
        ({"dtype": "float32", "compute_dtype": "bfloat16"}, "needs learner.dtype = bfloat16"),
        ({"dtype": "bfloat16", "compute_dtype": "float32", "zero_stage": "3"}, "not 3"),
    ],
)
def test_mixes_that_do_not_work_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[f"learner.{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("dotted", OWNED)
def test_a_setting_that_is_the_learners_own_is_refused_by_name(dotted: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.deepspeed\.{dotted} is not yours to set: {OWNED[dotted]}"):
        load_config(overrides=[f"learner.deepspeed.{dotted}=1"])


def test_other_deepspeed_settings_are_the_users() -> None:
    settings: dict[str, Any] = {"zero_optimization": {"overlap_comm": True}}
    assert LearnerSection(deepspeed=settings).deepspeed == settings


@pytest.mark.parametrize(
    ("stage", "offload", "message"),
    [
        (
            0,
            {"offload_optimizer": {"device": "cpu"}},
            r"offload_optimizer\.device = cpu needs learner\.zero_stage 1, 2 or 3",
        ),
        (2, {"offload_param": {"device": "cpu"}}, r"offload_param\.device = cpu needs learner\.zero_stage = 3"),
        (3, {"offload_param": {"device": "nvme"}}, r"offload_param\.device = nvme is not supported: every version"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_at_the_start(stage: int, offload: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(_toml(stage, offload))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (0, {"offload_optimizer": {"device": "none"}}),
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_what_can_be_offloaded_is_let_through(stage: int, offload: dict[str, Any]) -> None:
    assert load_config(_toml(stage, offload)).learner.deepspeed == {"zero_optimization": offload}


def _toml(stage: int, offload: dict[str, Any]) -> str:
    lines = ["[learner]", f"zero_stage = {stage}"]
    for name, keys in offload.items():
        lines += [
            f"[learner.deepspeed.zero_optimization.{name}]",
            *(f'{key} = "{value}"' for key, value in keys.items()),
        ]
    return "\n".join(lines)
