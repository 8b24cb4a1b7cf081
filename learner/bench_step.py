"""One training step to compare learners by: the same model, batch and measure for whoever computes it.

Invariant: batch and weights are functions of their descriptions alone, so that processes which share nothing else train the
same; what is measured of a step leaves out the base it started from. Held by tests/unit/learner/test_bench_step.py.

`benchmarks/trl_step.py` sets this learner beside TRL's by it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.learner.batch import TrainBatch
from anabranch.learner.bench_packing import BenchRollouts
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.model_costs import costs_of
from anabranch.learner.row_layout import RowLayout
from anabranch.learner.step import plan_step
from anabranch.schemas.config import CorrectionSection, GateSection, LearnerSection

CLIP = 0.2
BETAS = (0.9, 0.95)
# A clipped ratio to the recorded log-probs, a mean over all tokens, nothing else: what TRL's `dapo` loss is, its default.
CORRECTION = CorrectionSection(
    objective="ppo",
    advantage="dr_grpo",
    aggregation="token_mean",
    clip_low=CLIP,
    clip_high=CLIP,
    veto_low=0.0,
    veto_high=1e9,
)
_OPEN = GateSection(mismatch_action="off", ess_action="off", ess_sequence_action="off", ratio_mean_action="off")


@dataclass(frozen=True)
class StepModel:
    """A random Qwen3 with tied embeddings; heads of 64, three queries or so to a key."""

    hidden: int
    layers: int
    vocabulary: int

    def config(self) -> Any:
        from transformers import Qwen3Config

        heads = max(1, self.hidden // 64)
        return Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=heads,
            num_key_value_heads=next(n for n in (3, 2, 1) if heads % n == 0), head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=2**15,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write the float32 checkpoint into `folder`."""
        from transformers import Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Qwen3ForCausalLM(self.config()).save_pretrained(folder)

    def skeleton(self) -> Any:
        """The model without memory for its weights."""
        from transformers import Qwen3ForCausalLM

        with torch.device("meta"):
            return Qwen3ForCausalLM(self.config())


def step_batch(rollouts: BenchRollouts, vocabulary: int) -> TrainBatch:
    """Rewards of 0 and 1 in every group; recorded log-probs so far from a random model's that some ratios are clipped."""
    batch = rollouts.batch(vocabulary)
    rng = np.random.default_rng(1)
    behaviour = batch.behaviour + 0.1 * rng.standard_normal(batch.behaviour.shape).astype(np.float32)
    return replace(batch, behaviour=np.where(batch.completion_mask(), behaviour, np.float32(0)))


def advantages(batch: TrainBatch) -> NDArray[np.float32]:
    """float32 [R], those that a step under `CORRECTION` uses."""
    means = np.bincount(batch.group, batch.rewards) / np.bincount(batch.group)
    return (batch.rewards - means[batch.group]).astype(np.float32)


def as_padded_halves(batch: TrainBatch, pad: int) -> dict[str, NDArray[Any]]:
    """Prompts padded on the left and completions on the right, to the longest of the batch: TRL's layout and names.

    Returns:
        `prompt_ids`, `prompt_mask` [R, P]; `completion_ids`, `completion_mask` [R, C]: int64;
        `old_per_token_logps`: float32 [R, C]; `advantages`: float32 [R]; `num_items_in_batch`: int64 [].
    """
    most_prompt, most = int(batch.prompt_lengths.max()), int(batch.lengths.max())
    rows = len(batch.lengths)
    ids = {"prompt": np.full((rows, most_prompt), pad), "completion": np.full((rows, most), pad)}
    masks = {key: np.zeros(value.shape, np.int64) for key, value in ids.items()}
    for row, (prompt, length) in enumerate(zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        ids["prompt"][row, most_prompt - prompt :] = batch.token_ids[row, :prompt]
        masks["prompt"][row, most_prompt - prompt :] = 1
        ids["completion"][row, :length] = batch.token_ids[row, prompt : prompt + length]
        masks["completion"][row, :length] = 1
    return {
        **{f"{key}_ids": value.astype(np.int64) for key, value in ids.items()},
        **{f"{key}_mask": value for key, value in masks.items()},
        "old_per_token_logps": batch.behaviour, "advantages": advantages(batch),
        "num_items_in_batch": np.array(batch.tokens, np.int64),
    }  # fmt: skip


def rows_within(batch: TrainBatch, positions: int) -> int:
    """Rollouts of a forward pass with as many in each, padded halves of at most `positions` in all (one rollout at least)."""
    width = int(batch.prompt_lengths.max() + batch.lengths.max())
    rows = len(batch.lengths)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * width <= positions))


def budget_of_passes(model: StepModel, batch: TrainBatch, passes: int) -> int:
    """The smallest `learner.micro_batch_tokens` (to 1 %) that packs `batch` with shared prompts into `passes` or fewer."""
    layout = RowLayout(True, True, costs_of(model.skeleton()))

    def plan(budget: int) -> list[Any]:
        (share,) = plan_step(batch, CORRECTION, budget_tokens=budget, ranks=1, max_tokens=None, layout=layout)
        return share.updates[0].microbatches

    whole = int((batch.prompt_lengths + batch.lengths).sum())
    budget = max(16, sum(micro.input_ids.size for micro in plan(whole)) // passes)
    while len(plan(budget)) > passes:
        budget += 1 + budget // 100
    return budget


class Meter:
    """Wall and processor seconds and resident memory of a stretch of this process. Linux; one at a time."""

    def begin(self) -> None:
        """Gives freed memory back to the system first, so that the base is what is held."""
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        self._base = _status_mb("VmRSS")
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def end(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu,
            "base_mb": self._base, "peak_mb": _status_mb("VmHWM"),
        }  # fmt: skip


def _status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status does not tell {key}")


class OwnStep:
    """This project's learner with everything of a step in it, planning included."""

    def __init__(self, folder: Path, batch: TrainBatch, learner: LearnerSection) -> None:
        self._batch = batch
        self._engine = LearnerEngine(folder, learner, CORRECTION, _OPEN, run_seed=0, temperature=1.0)
        # Without these the two parts would have to be told apart by a profiler, which takes time itself.
        self._spent = {"backward": 0.0, "optimizer": 0.0}
        inner = self._engine._engine
        inner.backward = self._timed("backward", inner.backward)
        inner.step = self._timed("optimizer", inner.step)
        micro = self._engine.plan(batch)[0].updates[0].microbatches
        self.facts = {"passes": len(micro), "positions": sum(m.input_ids.size for m in micro)}

    def step(self) -> dict[str, float]:
        """One step; its loss, and seconds of the backward passes and of the optimizer."""
        self._spent.update(backward=0.0, optimizer=0.0)
        output = self._engine.train_step(self._batch)
        return {"loss": output.loss, **{f"{key}_seconds": value for key, value in self._spent.items()}}

    def gradients(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Of the first step, clipped, in order of names: Adam's first moment after it is (1 − β₁) times that."""
        from deepspeed.utils import safe_get_full_optimizer_state

        gate = self._engine._updater._gate
        named = {name.split("lm.", 1)[1]: p for name, p in self._engine._engine.module.named_parameters()}
        for name, parameter in sorted(named.items()):
            state = gate._base.state.get(parameter)
            moment = state["exp_avg"] if state else safe_get_full_optimizer_state(parameter, "exp_avg")
            yield name, moment.numpy() / np.float32(1 - BETAS[0])

    def _timed(self, part: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[part] += time.perf_counter() - began

        return run
