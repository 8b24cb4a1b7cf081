from pathlib import Path

import torch

from anabranch.learner.model_costs import costs_of, experts_of
from anabranch.learner.policy import load_model
from tests.unit.learner.conftest import VOCAB


def test_costs_are_multiply_adds(untied_model_dir: Path):
    costs = costs_of(load_model(untied_model_dir, torch.float32))
    # Two layers of hidden 32: queries and output 32×32 each, keys and values 32×16 each, three 32×64 of the MLP.
    assert costs.per_token == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert costs.per_pair == 2 * 2 * 2 * 16  # scores and sums of 2 heads of 16 in 2 layers
    assert costs.per_target == 4 / 3 * 32 * VOCAB


def test_a_token_meets_the_experts_it_is_sent_to(moe_dir: Path):
    lm = load_model(moe_dir, torch.float32)
    assert experts_of(lm.config) == 4
    attention, router, experts = 2 * 32 * 32 + 2 * 32 * 16, 4 * 32, 4 * 3 * 32 * 16
    assert costs_of(lm).per_token == 2 * (attention + router + experts * 2 / 4)
