import pytest

from anabranch.learner.deepspeed_config import compute_dtype, deepspeed_json, uses_master_weights
from anabranch.schemas.config import LearnerSection


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


def test_user_settings_are_merged_over_ours_at_any_depth():
    config = LearnerSection(
        lr=0.5, zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": True}, "dump_state": True}
    )
    merged = deepspeed_json(config)
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2**24}
    assert merged["dump_state"] is True
    assert merged["optimizer"]["params"]["lr"] == 0.5


def test_a_bucket_is_small_on_the_cpu_and_the_users_if_he_says():
    def bucket(**learner: object) -> object:
        return deepspeed_json(LearnerSection(**learner))["zero_optimization"].get("reduce_bucket_size")  # type: ignore[arg-type]

    assert bucket(zero_stage=3) == 2**24
    assert bucket(zero_stage=3, device="cuda") is None
    assert bucket(zero_stage=3, deepspeed={"zero_optimization": {"reduce_bucket_size": 5}}) == 5
