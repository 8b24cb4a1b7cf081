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
