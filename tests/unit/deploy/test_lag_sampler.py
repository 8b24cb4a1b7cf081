"""The study's sampler draws from the distribution it says, with log-probs that are the learner's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.deploy.lag_sampler import Completion, Sampler, _draw
from anabranch.learner.tiny_model import EOS_ID
from anabranch.schemas.errors import ModelMismatchError
from tests.lag_models import make_model

PROMPTS = [[65, 66, 67], [70, 71, 72, 73], [80, 81, 82]]
LENGTH = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def sampler(model: Path) -> Sampler:
    return Sampler(model, max_tokens=LENGTH)


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(0).random((len(PROMPTS), 4, LENGTH))


def whole_logprobs(sampler: Sampler, prompt: list[int], completion: Completion, temperature: float) -> np.ndarray:
    """By one pass over prompt and completion, without a cache."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = sampler._lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_at_the_temperature(
    sampler: Sampler, numbers: np.ndarray, temperature: float
) -> None:
    for prompt, completions in zip(PROMPTS, sampler.sample(PROMPTS, numbers, temperature=temperature), strict=True):
        assert len(completions) == 4
        for completion in completions:
            np.testing.assert_allclose(
                completion.logprobs, whole_logprobs(sampler, prompt, completion, temperature), atol=1e-5
            )


def test_a_completion_does_not_depend_on_what_is_sampled_beside_it(sampler: Sampler, numbers: np.ndarray) -> None:
    together = sampler.sample(PROMPTS, numbers, temperature=1.0)
    for place, prompt in enumerate(PROMPTS):
        (alone,) = sampler.sample([prompt], numbers[place : place + 1, 1:2], temperature=1.0)
        assert alone[0].token_ids.tolist() == together[place][1].token_ids.tolist()
    assert len({tuple(c.token_ids.tolist()) for each in together for c in each}) > 3


def test_a_completion_ends_at_the_end_of_sequence_or_at_the_longest(sampler: Sampler) -> None:
    # Token ids are cumulated in order, and the end of sequence is the last: numbers near 1 draw it.
    numbers = np.zeros((1, 2, LENGTH))
    numbers[0, 1, 2] = np.nextafter(1.0, 0.0)
    long, short = sampler.sample([[65, 66, 67]], numbers, temperature=1.0)[0]
    assert (long.finish_reason, len(long.token_ids)) == ("length", LENGTH)
    assert (short.finish_reason, len(short.token_ids), int(short.token_ids[-1])) == ("stop", 3, EOS_ID)
    assert len(short.logprobs) == 3


def test_temperature_0_takes_the_likeliest(sampler: Sampler, numbers: np.ndarray) -> None:
    for prompt, completions in zip(PROMPTS, sampler.sample(PROMPTS, numbers, temperature=0.0), strict=True):
        first = completions[0]
        assert all(c.token_ids.tolist() == first.token_ids.tolist() for c in completions)
        with torch.no_grad():
            logits = sampler._lm(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        assert int(logits.argmax()) == first.token_ids[0]


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = _draw(p.log().expand(1000, -1), numbers)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 500, 0, 300, 200, 0]
    assert _draw(p.log()[None], torch.zeros(1, dtype=torch.float64)).tolist() == [1], "never one without probability"


def test_weights_are_taken_bit_for_bit(model: Path, numbers: np.ndarray) -> None:
    one, other = Sampler(model, max_tokens=LENGTH), Sampler(model, max_tokens=LENGTH)
    bits = {n: w.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel() for n, w in one._weights.items()}
    with torch.no_grad():
        for weight in other._weights.values():
            weight.mul_(0.5)
    before = other.sample(PROMPTS, numbers, temperature=1.0)
    other.load(bits)
    after = other.sample(PROMPTS, numbers, temperature=1.0)
    mine = one.sample(PROMPTS, numbers, temperature=1.0)
    assert all(
        np.array_equal(a.logprobs, b.logprobs)
        for x, y in zip(after, mine, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert not np.array_equal(before[0][0].logprobs, mine[0][0].logprobs)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.other.weight"])
def test_weights_of_another_model_are_refused(sampler: Sampler, name: str) -> None:
    with pytest.raises(ModelMismatchError, match=name):
        sampler.load({name: np.zeros(7, np.uint16)})
