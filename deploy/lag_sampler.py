"""A sampler in plain torch: completions of a model that is already in memory, with their exact log-probs.

Invariant: a completion is a function of the weights, the prompt and the numbers it was drawn with, not of what else is sampled
beside it (to rounding); its log-probs are of the distribution it was drawn from, the learner's own at the same weights. Held by
tests/unit/deploy/test_lag_sampler.py.

No engine of a producer: the lag study needs many short runs in one process, and weights of any version at once. Tokens are drawn
by inverting the cumulated distribution at a given number, so two policies that differ a little draw the same tokens from the same
numbers but for a few: what two runs differ in is then the policy, not the dice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.learner.live_share import SIGNED, TORCH
from anabranch.learner.policy import load_model
from anabranch.schemas.errors import ModelMismatchError

Bits = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` int32 [T], end-of-sequence included; `logprobs` float32 [T]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str  # "stop" or "length"


class Sampler:
    """The model in `model_dir` in float32, with the weights of the last `load`."""

    def __init__(self, model_dir: Path, *, max_tokens: int) -> None:
        """Raises ConfigError: the model cannot be loaded."""
        lm = load_model(model_dir, torch.bfloat16)
        end = lm.generation_config.eos_token_id
        self._ends = torch.tensor(end if isinstance(end, list) else [end])
        self._lm = lm.float()
        self._weights = self._lm.state_dict()
        self._max_tokens = max_tokens

    @torch.no_grad()
    def load(self, bits: Bits) -> None:
        """Take the weights that `LearnerEngine.state_bits` gave.

        Raises:
            ModelMismatchError: they are of another model.
        """
        for name, values in bits.items():
            target = self._weights.get(name)
            if target is None or target.numel() != values.size:
                raise ModelMismatchError(f"the sampler's model has no weight {name!r} of {values.size} elements")
            dtype = {2: "bf16", 4: "f32"}[values.itemsize]
            target.copy_(torch.from_numpy(values.view(SIGNED[dtype])).view(TORCH[dtype]).view(target.shape))

    def sample(
        self, prompts: Sequence[Sequence[int]], numbers: NDArray[np.float64], *, temperature: float
    ) -> list[list[Completion]]:
        """For each prompt n completions. `numbers` [prompts, n, max_tokens], in [0, 1): what each token is drawn with.
        Temperature 0 takes the likeliest token (log-probs are those at temperature 1 then)."""
        done: list[list[Completion]] = [[] for _ in prompts]
        by_length: dict[int, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            by_length[len(prompt)].append(place)
        for places in by_length.values():  # of one length, so that nothing is padded
            ids = torch.tensor([list(prompts[place]) for place in places])
            each = iter(self._sample(ids, torch.from_numpy(numbers[places]), temperature))
            for place in places:
                done[place] = [next(each) for _ in range(numbers.shape[1])]
        return done

    @torch.inference_mode()
    def _sample(self, ids: torch.Tensor, numbers: torch.Tensor, temperature: float) -> list[Completion]:
        from transformers import DynamicCache

        each = numbers.shape[1]
        rows = len(ids) * each
        tokens = torch.zeros(rows, self._max_tokens, dtype=torch.int64)
        logprobs = torch.zeros(rows, self._max_tokens)
        lengths = torch.full((rows,), self._max_tokens)
        stopped = torch.zeros(rows, dtype=torch.bool)
        cache = DynamicCache(config=self._lm.config)
        hidden = self._lm.base_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        cache.batch_repeat_interleave(each)  # a prompt is computed once
        hidden = hidden.repeat_interleave(each, 0)
        draws, live = numbers.flatten(0, 1), torch.arange(rows)
        for place in range(self._max_tokens):
            logits = self._lm.get_output_embeddings()(hidden)
            log_p = torch.log_softmax(logits / (temperature or 1.0), -1)
            chosen = _draw(log_p, draws[live, place]) if temperature else log_p.argmax(-1)
            tokens[live, place] = chosen
            logprobs[live, place] = log_p.gather(1, chosen[:, None])[:, 0]
            ended = torch.isin(chosen, self._ends)
            lengths[live[ended]] = place + 1
            stopped[live[ended]] = True
            if place + 1 == self._max_tokens or bool(ended.all()):
                break
            if bool(ended.any()):
                on = (~ended).nonzero()[:, 0]
                live, chosen = live[on], chosen[on]
                cache.batch_select_indices(on)
            hidden = self._lm.base_model(
                input_ids=chosen[:, None], past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
        return [
            Completion(
                tokens[row, :length].numpy().astype(np.int32), logprobs[row, :length].numpy().copy(),
                "stop" if stopped[row] else "length",
            )
            for row, length in enumerate(lengths.tolist())
        ]  # fmt: skip


def _draw(log_p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the first token whose cumulated probability exceeds the number. A token without probability is never it."""
    cumulated = log_p.double().exp().cumsum(-1)
    wanted = (numbers * cumulated[:, -1])[:, None]
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp(max=log_p.shape[1] - 1)
