"""The supervised phase before RL: a model made on the spot learns the task, and stays less sure than it could be.

Invariant: the result is a function of (weights, examples, `WarmStart`) alone on one machine and thread count; the mean
probability of a right answer at its end is at most `start_reward`, measured on problems it has not seen. Held by
tests/unit/learner/test_tiny_model.py.

What is special here, and why. RL from nothing would take hours: the warm start gives the model most of what there is
to know about the task. That would leave little to see, so the output head is then scaled down (a softmax temperature
put into the weights) until an answer sampled at temperature 1 is right with probability `start_reward`. RL begins with
a policy that knows more than it shows: it has to become sure where it is right, then to learn what it did not know.
Most of the gain in reward is therefore sharpening. Stopping the supervised phase early, at the same reward, would be
the plainer way; measured, RL then gained 0.1 to 0.2 in 80 to 100 steps instead of 0.5 in 40.
Adam moves every weight by about the learning rate a step, however small the weight is; `head_gain` moves scale from the
head to the norm before it (the same function), so that the head comes back in tens of steps at a rate that is gentle to
everything else.
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

    fall_below: float = 0.35  # smoothed loss at which the rates begin to fall: the model has understood carrying
    fall_steps: int = 90  # then both rates fall linearly to 0
    max_steps: int = 400  # they begin to fall early enough to end here in any case
    batch: int = 128  # examples of one step, each seen once
    lr_matrices: float = 1e-2  # Muon, for the matrices between embedding and head
    lr_others: float = 3e-3  # AdamW, for embedding, head and norms
    warmup_steps: int = 20
    loss_smoothing: float = 0.1
    grad_clip: float = 1.0
    start_reward: float = 0.40  # what the sampled policy should begin RL with
    head_gain: float = 16.0  # a power of two, so that it is exact in bf16
    measured_on: int = 1000  # problems after the last trained one
    report_every: int = 20


def warm_start(model: Any, examples: Examples, recipe: WarmStart, *, pad_id: int, report: Report) -> float:
    """Train `model` (float32, in place) on `examples`, then flatten it; returns the mean probability of a right answer.

    Args:
        examples: problem `i`; in order, each once, the last `measured_on` only to measure.
        report: called with a line of progress now and then.
    """
    model.train()
    matrices, others = _split(model)
    muon = Muon(matrices, lr=recipe.lr_matrices)
    adamw = torch.optim.AdamW(others, lr=recipe.lr_others, betas=(0.9, 0.95), weight_decay=0.0)
    began, smoothed = time.monotonic(), math.inf
    step, end = 0, recipe.max_steps
    while step < end:
        factor = min(1.0, (step + 1) / recipe.warmup_steps, (end - step) / recipe.fall_steps)
        muon.lr, adamw.param_groups[0]["lr"] = recipe.lr_matrices * factor, recipe.lr_others * factor
        batch = [examples(step * recipe.batch + i) for i in range(recipe.batch)]
        loss = _answer_loss(model, batch, pad_id)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        muon.step()
        adamw.step()
        step += 1
        value = loss.item()
        smoothed = value if step == 1 else smoothed + recipe.loss_smoothing * (value - smoothed)
        if smoothed <= recipe.fall_below:
            end = min(end, step + recipe.fall_steps)
        if step % recipe.report_every == 0:
            report(f"warm start step {step}, loss {smoothed:.2f}, {time.monotonic() - began:.0f} s")
    model.eval()
    unseen = [examples(step * recipe.batch + i) for i in range(recipe.measured_on)]
    before, after = flatten_policy(model, unseen, recipe.start_reward, pad_id=pad_id)
    with torch.no_grad():
        model.get_output_embeddings().weight.div_(recipe.head_gain)
        model.model.norm.weight.mul_(recipe.head_gain)
    report(f"warm start done: a sampled answer was right with probability {before:.3f}, flattened to {after:.3f}")
    return after


@torch.no_grad()
def flatten_policy(model: Any, unseen: Sequence[Example], start_reward: float, *, pad_id: int) -> tuple[float, float]:
    """Scale the output head by a factor ≤ 1, in place, so that the mean probability of a right answer to `unseen` at
    temperature 1 is `start_reward`, or what it was if that is less. Returns the probability before and after.

    The probability of an answer is the product over its tokens, end-of-sequence included: no sampling, no noise.
    """
    logits, targets, rows = _answer_logits(model, unseen, pad_id)

    def probability(scale: float) -> float:
        chosen = functional.log_softmax(logits * scale, -1).gather(1, targets[:, None])[:, 0]
        return float(torch.zeros(len(unseen)).index_add_(0, rows, chosen).exp().mean())

    low, high = 0.01, 1.0
    before = probability(high)
    if before <= start_reward:
        return before, before
    for _ in range(40):  # bisection, to the last digit that matters
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probability(middle) <= start_reward else (low, middle)
    model.get_output_embeddings().weight.mul_(low)
    return before, probability(low)


def _split(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices between embedding and head, and all other parameters."""
    outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]
    inner = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in inner]


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
