"""The supervised phase before RL: a model made on the spot learns the task, and stays less sure than it could be.

Invariant: the result is a function of (weights, examples, `WarmStart`) alone on one machine and thread count; the mean
probability of a right answer at its end is at most `start_reward`, measured on problems it has not seen. Held by
tests/unit/learner/test_tiny_model.py.

What is special here, and why. RL from nothing would take hours: the warm start gives the model most of what there is
to know about the task. It would leave little to see, so its output head is then scaled down (a softmax temperature put
into the weights) until an answer sampled at temperature 1 is right with probability `start_reward`. RL begins with a
policy that knows more than it shows, has to become sure where it is right, and then to learn what it did not know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.learner.muon import Muon

Example = tuple[list[int], list[int]]  # token ids of a prompt and of what should follow, end-of-sequence included
Examples = Callable[[int], Example]  # by index, any number of them
Report = Callable[[str], None]

IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Chosen on the `tiny` preset's task, see deploy/presets/tiny.toml."""

    steps: int = 240
    batch: int = 128  # examples of one step, each seen once
    lr_matrices: float = 1e-2  # Muon, for the matrices between embedding and head
    lr_others: float = 3e-3  # AdamW, for embedding, head and norms
    warmup_steps: int = 20
    decay_from: float = 0.65  # share of the steps after which both rates fall linearly to 0
    grad_clip: float = 1.0
    start_reward: float = 0.42  # what the sampled policy should begin RL with
    measured_on: int = 1000  # problems after the last trained one
    report_every: int = 20


def warm_start(model: Any, examples: Examples, recipe: WarmStart, *, pad_id: int, report: Report) -> float:
    """Train `model` (float32, in place) on `examples`, then flatten it; returns the mean probability of a right answer.

    Args:
        examples: problem `i`; the first steps·batch are trained on, the next `measured_on` measured on.
        report: called with a line of progress now and then.
    """
    model.train()
    matrices, others = _split(model)
    muon = Muon(matrices, lr=recipe.lr_matrices)
    adamw = torch.optim.AdamW(others, lr=recipe.lr_others, betas=(0.9, 0.95), weight_decay=0.0)
    began = time.monotonic()
    for step in range(recipe.steps):
        factor = _schedule(step, recipe)
        muon.lr, adamw.param_groups[0]["lr"] = recipe.lr_matrices * factor, recipe.lr_others * factor
        batch = [examples(step * recipe.batch + i) for i in range(recipe.batch)]
        loss = _answer_loss(model, batch, pad_id)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        muon.step()
        adamw.step()
        if (step + 1) % recipe.report_every == 0:
            seconds = time.monotonic() - began
            left = seconds / (step + 1) * (recipe.steps - step - 1)
            report(f"warm start {step + 1}/{recipe.steps}, loss {loss.item():.2f}, about {left:.0f} s left")
    model.eval()
    first_unseen = recipe.steps * recipe.batch
    probability, scale = flatten_policy(
        model, [examples(first_unseen + i) for i in range(recipe.measured_on)], recipe.start_reward, pad_id=pad_id
    )
    report(
        f"warm start done: a sampled answer is right with probability {probability:.3f} (head scaled by {scale:.3f})"
    )
    return probability


@torch.no_grad()
def flatten_policy(model: Any, unseen: Sequence[Example], start_reward: float, *, pad_id: int) -> tuple[float, float]:
    """Scale the output head by a factor ≤ 1, in place, so that the mean probability of a right answer to `unseen` at
    temperature 1 is `start_reward`, or what it was if that is less. Returns the probability and the factor.

    The probability of an answer is the product over its tokens, end-of-sequence included: no sampling, no noise.
    """
    logits, targets, rows = _answer_logits(model, unseen, pad_id)

    def probability(scale: float) -> float:
        chosen = functional.log_softmax(logits * scale, -1).gather(1, targets[:, None])[:, 0]
        return float(torch.zeros(len(unseen)).index_add_(0, rows, chosen).exp().mean())

    low, high = 0.01, 1.0
    if probability(high) <= start_reward:
        return probability(high), high
    for _ in range(40):  # bisection, to the last digit that matters
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probability(middle) <= start_reward else (low, middle)
    model.get_output_embeddings().weight.mul_(low)
    return probability(low), low


def _split(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices between embedding and head, and all other parameters."""
    outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]
    inner = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in inner]


def _schedule(step: int, recipe: WarmStart) -> float:
    rise = min(1.0, (step + 1) / recipe.warmup_steps)
    fall = min(1.0, (1 - step / recipe.steps) / (1 - recipe.decay_from))
    return rise * fall


def _answer_loss(model: Any, batch: Sequence[Example], pad_id: int) -> Tensor:
    logits, targets, _ = _answer_logits(model, batch, pad_id)
    return functional.cross_entropy(logits, targets)


def _answer_logits(model: Any, batch: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, vocabulary] of the N answer tokens of `batch`, the tokens [N], and their examples' positions [N]."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.full((len(batch), length), pad_id)
    labels = torch.full((len(batch), length), IGNORED)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    labels = labels[:, 1:]
    rows, columns = (labels != IGNORED).nonzero(as_tuple=True)
    # Padding is on the right: a causal model's answer tokens never see it, so no mask is needed.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[rows, columns]
    return model.get_output_embeddings()(hidden), labels[rows, columns], rows
