import pytest

from anabranch.learner.bench_packing import BenchModel, BenchRollouts, plan_figures, speed_figures

MODEL = BenchModel(hidden=64, layers=1, vocabulary=50)


def test_the_plan_of_a_log_normal_mix_has_little_padding_and_even_ranks():
    mix = BenchRollouts(32, 8, prompt=60, completion=100, spread=1.0, longest=1000)
    figures = plan_figures(MODEL, mix, budget_tokens=4096)
    assert figures["packed_padding"] == figures["shared_padding"] == 0
    assert figures["padded_padding"] > 0
    assert figures["packed_budget_left_over"] < 0.05
    assert figures["shared_positions"] < figures["packed_positions"] < figures["padded_positions"]
    for ranks in (2, 4, 8):
        assert 1 <= figures[f"packed_{ranks}_ranks_max_over_mean"] < 1.01
        assert figures[f"shared_{ranks}_ranks_in_step_over_mean"] < 1.1


def test_all_ways_compute_the_same_gradient():
    said: list[str] = []
    figures = speed_figures(
        MODEL, BenchRollouts(2, 4, prompt=32, completion=8), budget_tokens=128, rounds=1, tell=said.append
    )
    assert figures["gradient_packed_from_padded"] < 1e-5
    assert figures["gradient_shared_from_packed"] < 1e-5
    assert figures["completion_tokens"] == 2 * 4 * 8
    assert figures["shared_positions"] == 2 * (32 + 4 * 7)
    assert figures["packed_positions"] == 2 * 4 * (32 + 7)
    assert figures["shared_over_packed_by_cost"] == pytest.approx(39 * 4 / 60, rel=0.3)
    assert said == [f"{way}, {when}" for when in ("warm-up", "round 1 of 1") for way in ("padded", "packed", "shared")]
