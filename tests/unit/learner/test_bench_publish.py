"""The benchmark times as many steps with publishing as without, and everything it says it published is on its channel."""

from pathlib import Path

from anabranch.learner.bench_publish import bench_publish
from anabranch.schemas.config import load_config


def test_it_measures_both_kinds_of_steps_in_turns(model_dir: Path) -> None:
    config = load_config(
        "", overrides=[
            f"model.path={model_dir}", "learner.groups_per_step=2", "learner.lr=1e-3", "sampling.max_tokens=4",
            "sampling.group_size=2", "task.max_prompt_tokens=8", "channel.codec_threads=1",
        ],
    )  # fmt: skip
    told: list[str] = []
    figures = bench_publish(config, rounds=2, steps=3, tell=told.append)
    assert told == ["warm-up", "round 1 of 2", "round 2 of 2"]
    assert figures["steps_timed"] == 2 * 2 * 3
    assert figures["step_s_with"] > 0
    assert figures["step_s_without"] > 0
    assert 0 < figures["changed_fraction_median"] < 1
    assert figures["delta_bytes_median"] > 0
    assert figures["skips"] >= 4
    assert 0 <= figures["cpu_share_beside_training_with"] < 1
