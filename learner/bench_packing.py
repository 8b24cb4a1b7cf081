"""`anabranch bench packing`: what packing and shared prompts buy, on a plan and on a model.

Invariant: the ways are timed in turns of one run, on the same rollouts, so that a busy moment of the machine meets all; each
computes the whole gradient, which is compared. Held by tests/unit/learner/test_bench_packing.py.

Timed is forward, loss and backward of all microbatches of a step; the optimizer's part is the same for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.learner.batch import TrainBatch
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.model_costs import costs_of
from anabranch.learner.packed_attention import use_packed_attention
from anabranch.learner.policy import PolicyModule
from anabranch.learner.row_layout import RowLayout
from anabranch.learner.step import microbatch_loss, plan_step
from anabranch.schemas.config import CorrectionSection

CORRECTION = CorrectionSection(veto_low=0.0, veto_high=1e9)


@dataclass(frozen=True)
class BenchModel:
    """A random Qwen3. The default has a body and a head in the proportion of Qwen3-0.6B."""

    hidden: int = 384
    layers: int = 8
    vocabulary: int = 8192

    def build(self) -> PolicyModule:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 128) if self.hidden % 128 == 0 else 1, head_dim=64,
            tie_word_embeddings=True, max_position_embeddings=2**15,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            policy = PolicyModule(Qwen3ForCausalLM(config).eval(), 1.0)
        use_packed_attention(policy, SegmentPlan.of)
        return policy


@dataclass(frozen=True)
class BenchRollouts:
    """Groups of random tokens. `spread`: σ of the logarithm of lengths; 0: all are as long as the medians say."""

    groups: int
    group_size: int
    prompt: int
    completion: int
    spread: float = 0.0
    longest: int = 4096

    def batch(self, vocabulary: int) -> TrainBatch:
        rng = np.random.default_rng(0)
        rows = self.groups * self.group_size

        def lengths(median: int, count: int) -> Any:
            return (median * np.exp(self.spread * rng.standard_normal(count))).astype(np.int64).clip(1, self.longest)

        group = np.repeat(np.arange(self.groups), self.group_size)
        prompts, completions = lengths(self.prompt, self.groups)[group], lengths(self.completion, rows)
        ids = rng.integers(0, vocabulary, (rows, int((prompts + completions).max())))
        first = np.arange(rows) // self.group_size * self.group_size
        places = np.arange(ids.shape[1])
        ids = np.where(
            places < prompts[:, None], ids[first], np.where(places < (prompts + completions)[:, None], ids, 0)
        )
        shape = (rows, int(completions.max()))
        behaviour = np.full(shape, -np.log(vocabulary), np.float32)
        rewards = (np.arange(rows) % 2).astype(np.float64)
        zeros = np.zeros(rows, np.int64)
        return TrainBatch(
            token_ids=ids.astype(np.int64), prompt_lengths=prompts, lengths=completions, behaviour=behaviour,
            ages=np.zeros(shape, np.int64), queue_ages=zeros, rewards=rewards, group=group,
            group_indices=np.arange(self.groups),
        )  # fmt: skip


def plan_figures(model: BenchModel, rollouts: BenchRollouts, *, budget_tokens: int) -> dict[str, Any]:
    """Padding and balance of the plan of a step, without computing it. Shares are of 1."""
    policy, batch = model.build(), rollouts.batch(model.vocabulary)
    costs = costs_of(policy.lm)
    ways = {"padded": RowLayout(), "packed": RowLayout(True, False, costs), "shared": RowLayout(True, True, costs)}
    figures: dict[str, Any] = {"rollouts": len(batch.lengths), "budget_tokens": budget_tokens}
    for name, layout in ways.items():
        (micro,) = _plan(batch, layout, budget_tokens, ranks=1)
        computed = sum(m.input_ids.size for m in micro)
        wanted = sum(_positions(m) for m in micro)
        figures[f"{name}_positions"] = computed
        figures[f"{name}_padding"] = round(1 - wanted / computed, 4)
        figures[f"{name}_budget_left_over"] = round(1 - computed / (len(micro) * budget_tokens), 4)
    for name in ("packed", "shared"):
        (micro,) = _plan(batch, ways[name], budget_tokens, ranks=1)
        plans = [SegmentPlan.of(m.segments, m.input_ids.size) for m in micro]
        wanted, computed = (sum(getattr(plan, key) for plan in plans) for key in ("pairs", "computed_pairs"))
        figures[f"{name}_attention_padding"] = round(1 - wanted / computed, 4)
        for ranks in (2, 4, 8):
            table = np.array(
                [[_cost(m, costs) for m in rank] for rank in _plan(batch, ways[name], budget_tokens, ranks=ranks)]
            )
            mean = table.sum() / ranks
            figures[f"{name}_{ranks}_ranks_max_over_mean"] = round(float(table.sum(axis=1).max() / mean), 4)
            figures[f"{name}_{ranks}_ranks_in_step_over_mean"] = round(float(table.max(axis=0).sum() / mean), 4)
    return figures


def _plan(batch: TrainBatch, layout: RowLayout, budget_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    shares = plan_step(batch, CORRECTION, budget_tokens=budget_tokens, ranks=ranks, max_tokens=None, layout=layout)
    return [share.updates[0].microbatches for share in shares]


def _positions(micro: MicroBatch) -> int:
    """Positions whose state is wanted: of a padded row all up to the last that predicts a token."""
    if len(micro.segments):
        return micro.input_ids.size
    width = micro.input_ids.shape[1]
    ends = np.zeros(len(micro.input_ids), np.int64)
    np.maximum.at(ends, micro.predecessors // width, micro.predecessors % width + 1)
    return int(ends.sum())


def _cost(micro: MicroBatch, costs: Any) -> float:
    pairs = SegmentPlan.of(micro.segments, micro.input_ids.size).pairs
    return float(
        costs.per_token * micro.input_ids.size + costs.per_pair * pairs + costs.per_target * len(micro.targets)
    )


def speed_figures(
    model: BenchModel, rollouts: BenchRollouts, *, budget_tokens: int, rounds: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    """Completion tokens per second of padded, packed and shared rows, `rounds` timed passes of each in turns after one that
    warms up; and how far their gradients are apart, as |a − b| / |b| of the whole gradient."""
    policy, batch = model.build(), rollouts.batch(model.vocabulary)
    costs = costs_of(policy.lm)
    ways = {"padded": RowLayout(), "packed": RowLayout(True, False, costs), "shared": RowLayout(True, True, costs)}
    plans = {name: _plan(batch, layout, budget_tokens, ranks=1)[0] for name, layout in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, Tensor] = {}
    for number in range(1 + rounds):
        for name, micro in plans.items():
            tell(f"{name}, " + (f"round {number} of {rounds}" if number else "warm-up"))
            wall, cpu, gradients[name] = _timed_pass(policy, micro)
            if number:
                seconds[name].append(wall)
                processor[name].append(cpu)
    tokens = int(batch.lengths.sum())
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    median_cpu = {name: statistics.median(taken) for name, taken in processor.items()}
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "vocabulary": model.vocabulary,
        "threads": torch.get_num_threads(),
        "groups": rollouts.groups, "group_size": rollouts.group_size, "prompt": rollouts.prompt,
        "completion": rollouts.completion, "completion_tokens": tokens,
        **{f"{name}_tokens_per_s": round(tokens / taken, 1) for name, taken in median.items()},
        **{f"{name}_positions": sum(m.input_ids.size for m in micro) for name, micro in plans.items()},
        "packed_over_padded": round(median["padded"] / median["packed"], 3),
        "shared_over_packed": round(median["packed"] / median["shared"], 3),
        "shared_over_packed_by_round": [
            round(a / b, 3) for a, b in zip(seconds["packed"], seconds["shared"], strict=True)
        ],
        # A machine that others use takes wall time from one way or another; processor time less so.
        "packed_over_padded_cpu": round(median_cpu["padded"] / median_cpu["packed"], 3),
        "shared_over_packed_cpu": round(median_cpu["packed"] / median_cpu["shared"], 3),
        "shared_over_packed_by_cost": round(
            sum(_cost(m, costs) for m in plans["packed"]) / sum(_cost(m, costs) for m in plans["shared"]), 3
        ),
        **{f"gradient_{name}_from_{other}": _apart(gradients[name], gradients[other]) for name, other in _PAIRS},
    }  # fmt: skip


_PAIRS = (("packed", "padded"), ("shared", "packed"))


def _apart(a: Tensor, b: Tensor) -> float:
    return float(f"{float((a - b).norm() / b.norm()):.3g}")


def _timed_pass(policy: PolicyModule, microbatches: list[MicroBatch]) -> tuple[float, float, Tensor]:
    """Wall and processor seconds, and the whole gradient."""
    policy.zero_grad()
    began, cpu_began = time.perf_counter(), time.process_time()
    for loss in _losses(policy, microbatches):
        loss.backward()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return wall, cpu, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def _losses(policy: PolicyModule, microbatches: list[MicroBatch]) -> Iterator[Tensor]:
    sums = DiagnosticSums()
    for micro in microbatches:
        logprobs, entropy = policy(*micro.model_inputs(torch.device("cpu")))
        yield microbatch_loss(micro, logprobs, entropy, CORRECTION, sums)
