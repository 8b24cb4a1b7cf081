import pytest

from anabranch.learner.deepspeed_config import OWNED, compute_dtype, deepspeed_json, uses_master_weights
from anabranch.schemas.config import LearnerSection
from anabranch.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "dtype", "stage", "compute", "masters"),
    [
        ("cpu", "bfloat16", 0, "float32", True),
        ("cpu", "bfloat16", 2, "float32", True),
        ("cpu", "bfloat16", 3, "bfloat16", False),
        ("cpu", "float32", 1, "float32", False),
        ("cuda", "bfloat16", 0, "bfloat16", True),
        ("cuda", "bfloat16", 1, "bfloat16", False),
    ],
)
def test_how_device_dtype_and_stage_combine(device, dtype, stage, compute, masters):
    config = LearnerSection(device=device, dtype=dtype, zero_stage=stage)
    assert compute_dtype(config) == compute
    assert uses_master_weights(config) == masters
    assert deepspeed_json(config)["bf16"]["enabled"] == (dtype == "bfloat16" and not masters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "float16 needs loss scaling"),
        ({"dtype": "float32", "compute_dtype": "bfloat16"}, "needs learner.dtype = bfloat16"),
        ({"dtype": "bfloat16", "compute_dtype": "float32", "zero_stage": 3}, "not 3"),
    ],
)
def test_mixes_that_do_not_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        deepspeed_json(LearnerSection(**settings))


def test_user_settings_are_merged_over_ours_at_any_depth():
    config = LearnerSection(
        lr=0.5, zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": True}, "dump_state": True}
    )
    merged = deepspeed_json(config)
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert merged["dump_state"] is True
    assert merged["optimizer"]["params"]["lr"] == 0.5


@pytest.mark.parametrize("dotted", OWNED)
def test_a_setting_that_is_the_learners_own_is_refused_by_name(dotted):
    tree = 1
    for key in reversed(dotted.split(".")):
        tree = {key: tree}
    with pytest.raises(ConfigError, match=rf"learner\.deepspeed\.{dotted} is not yours to set: {OWNED[dotted]}"):
        deepspeed_json(LearnerSection(deepspeed=tree))
