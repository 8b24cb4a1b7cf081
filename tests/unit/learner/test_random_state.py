import json
import random

import numpy as np
import torch

from anabranch.learner.random_state import capture, restore, seed_everything


def draw() -> tuple[float, list[float], list[float]]:
    # Normal deviates come in pairs: the second of a pair is part of the state.
    return random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_every_generator_continues_where_it_was():
    seed_everything(5)
    draw()
    state = json.loads(json.dumps(capture()))
    expected = [draw() for _ in range(3)]
    seed_everything(6)
    assert draw() != expected[0]
    restore(state)
    assert [draw() for _ in range(3)] == expected
