"""The training engine: a causal language model under DeepSpeed, one optimizer step per batch.

Invariant: `train_step` is a function of the weights, the optimizer state and the batch alone: the same batch gives
the same bits, however its groups arrived; lr = 0 leaves every bit. With several ranks every method is collective:
all ranks call it with the same arguments. Held by tests/unit/learner/test_engine.py and
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.learner import deepspeed_shim, random_state
from anabranch.learner.batch import TrainBatch
from anabranch.learner.deepspeed_config import compute_dtype, deepspeed_json, uses_master_weights
from anabranch.learner.deepspeed_files import guard_files
from anabranch.learner.distribute import init_ranks
from anabranch.learner.live_share import LiveShare
from anabranch.learner.policy import MasterWeights, PolicyModule, check_head, load_model
from anabranch.learner.quiet import import_deepspeed, quiet, without_deprecations
from anabranch.learner.random_state import seed_everything
from anabranch.learner.step import StepOutput, StepShare, microbatch_loss, plan_step
from anabranch.learner.weights import PublishedWeights
from anabranch.schemas.config import CorrectionSection, LearnerSection
from anabranch.schemas.errors import AnabranchError, CheckpointError, ConfigError
from anabranch.schemas.layout import Layout
from anabranch.transport.files import read_json

DEEPSPEED_FOLDER = "deepspeed"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LearnerEngine:
    """Weights, optimizer and step counter of one rank.

    `step` is the number of optimizer steps done. After an AnabranchError from `train_step` the engine must not be
    used further: resume from a checkpoint.
    """

    def __init__(
        self,
        model_dir: Path,
        learner: LearnerSection,
        correction: CorrectionSection,
        *,
        run_seed: int,
        temperature: float,
        max_tokens: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        """Load the model and start DeepSpeed.

        Args:
            model_dir: Hugging Face checkpoint folder.
            temperature: at which rollouts are sampled; logits are divided by it.
            max_tokens: longest completion that can be sampled; the constant of aggregation "constant".
            rank, world_size: this process among the learner's ranks (see `distribute`).
            heartbeat: called before every microbatch, so that a long step is not taken for a hung one.

        Raises:
            ConfigError: settings that cannot work, named; the model cannot be loaded.
            ModelMismatchError: the model's head is more than a linear map.
        """
        if correction.aggregation == "constant" and max_tokens is None:
            raise ConfigError("correction.aggregation = constant needs the longest completion (sampling.max_tokens)")
        if learner.world_size != world_size:
            raise ConfigError(f"learner.world_size = {learner.world_size}, but {world_size} ranks were started")
        masters = uses_master_weights(learner)
        settings = deepspeed_json(learner)
        self._learner, self._correction = learner, correction
        self._max_tokens = max_tokens
        self._rank, self._world_size = rank, world_size
        self._heartbeat = heartbeat
        self.model_dir = model_dir
        self.step = 0

        if learner.device == "cpu":
            deepspeed_shim.prepare_environment()
        torch.set_num_threads(learner.threads)
        seed_everything(run_seed)
        deepspeed = import_deepspeed()
        if learner.device == "cpu":
            deepspeed_shim.apply(deepspeed)
        # Ranks above 0 wait in a collective for as long as rank 0 waits for anybody.
        longest_wait_s = max(learner.batch_deadline_s, learner.evaluate_deadline_s)
        init_ranks(rank, world_size, device=learner.device, deadline_s=longest_wait_s + 600)

        stored = DTYPES[learner.dtype]
        policy = PolicyModule(load_model(model_dir, stored), temperature)
        check_head(policy)
        self._vocabulary = int(policy.lm.get_input_embeddings().weight.shape[0])
        self._weights = PublishedWeights(policy.lm)
        module: torch.nn.Module = policy
        if masters:
            module = MasterWeights(policy, stored, DTYPES[compute_dtype(learner)])
        for parameter in policy.head_logprobs.external_parameters():
            deepspeed.zero.register_external_parameter(policy.head_logprobs, parameter)
        with quiet():
            self._engine, *_ = deepspeed.initialize(
                model=module, model_parameters=list(module.parameters()), config=settings
            )
        guard_files(self._engine)
        self._clipper = None
        if learner.zero_stage == 0:
            self._clipper = _Clipper(self._engine.optimizer, learner.grad_clip)
        self._device = torch.device(self._engine.device)
        self._share = self._weights.share(rank, world_size)

    @property
    def layout(self) -> Layout:
        """Names, dtypes and shapes of `state_bits`; on every rank."""
        return self._weights.layout

    @property
    def share(self) -> LiveShare:
        """What this rank publishes of the weights."""
        return self._share

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return self._vocabulary

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update that leads to `step` (1, 2, ...): linear warm-up, then constant."""
        warmup = self._learner.warmup_steps
        return self._learner.lr * min(1.0, step / warmup) if warmup else self._learner.lr

    def plan(self, batch: TrainBatch) -> list[StepShare]:
        """Each rank's share of a step on `batch`. No rank needs more than its own."""
        return plan_step(
            batch, self._correction, budget_tokens=self._learner.micro_batch_tokens,
            ranks=self._world_size, max_tokens=self._max_tokens,
        )  # fmt: skip

    def train_step(self, batch: TrainBatch) -> StepOutput:
        """`train_share` where every rank holds the whole batch."""
        return self.train_share(self.plan(batch)[self._rank])

    def train_share(self, share: StepShare) -> StepOutput:
        """One optimizer step; `share` is this rank's of `plan`.

        Raises:
            AnabranchError: loss or gradient is not finite. Nothing has been published or saved of it.
        """
        lr = self.learning_rate(self.step + 1)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        with without_deprecations():
            return self._step(share, lr)

    def _step(self, share: StepShare, lr: float) -> StepOutput:
        sums = DiagnosticSums(self._device)
        for micro in share.microbatches:
            self._heartbeat()
            logprobs, entropy = self._engine(*micro.model_inputs(self._device))
            loss = microbatch_loss(micro, logprobs, entropy, self._correction, sums)
            # DeepSpeed averages gradients over ranks; the loss is already a share of one global sum.
            self._engine.backward(loss * self._world_size)
        self._sum_over_ranks(sums)
        diagnostics, loss_value = sums.finish(total_mass=share.facts.total_mass)
        if not math.isfinite(loss_value):
            raise AnabranchError(f"step {self.step + 1}: the loss is {loss_value}; {share.facts}")
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm() if self._clipper is None else self._clipper.norm)
        if not math.isfinite(grad_norm) or not self._engine.was_step_applied():
            raise AnabranchError(f"step {self.step + 1}: the gradient is not finite; {share.facts}")
        self.step += 1
        return StepOutput(
            step=self.step, loss=loss_value, grad_norm=grad_norm, lr=lr, diagnostics=diagnostics,
            zero_variance_groups=share.facts.zero_variance_groups, groups=share.facts.groups,
        )  # fmt: skip

    def state_bits(self) -> dict[str, NDArray[Any]]:
        """All weights as a checkpoint would store them, gathered: name -> flat unsigned-integer array (uint16 for bfloat16,
        uint32 for float32), on rank 0; an empty dict on the others. The arrays are copies."""
        with without_deprecations():
            return self._weights.bits(on_this_rank=self._rank == 0)

    def save(self, directory: Path, client_state: dict[str, Any]) -> None:
        """Write everything a bit-equal continuation needs to `directory`, which must be new (all ranks see it).

        The weights and optimizer state are DeepSpeed's files; the rest is JSON. Use `CheckpointStore`, which makes
        it atomic and durable.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with quiet():
            self._engine.save_checkpoint(str(directory), tag=DEEPSPEED_FOLDER, save_latest=False)
        (directory / f"rng-{self._rank}.json").write_text(json.dumps(random_state.capture()))
        if self._rank == 0:
            for script in directory.glob("*.py"):
                script.unlink()  # DeepSpeed adds conversion scripts; ours is `CheckpointStore.export`
            (directory / "engine.json").write_text(json.dumps({"step": self.step} | self._identity()))
            (directory / "client.json").write_text(json.dumps(client_state))
        torch.distributed.barrier()

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote; returns its `client_state`. Call it on a new engine.

        Raises:
            CheckpointError: written by another number of ranks, stage or dtype; or a file cannot be read.
        """
        saved = read_json(directory / "engine.json", refuse=CheckpointError)
        for key, ours in self._identity().items():
            if saved.get(key) != ours:
                raise CheckpointError(f"{directory} was written with {key} = {saved.get(key)}; this learner has {ours}")
        with quiet():
            path, _ = self._engine.load_checkpoint(str(directory), tag=DEEPSPEED_FOLDER)
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint")
        random_state.restore(read_json(directory / f"rng-{self._rank}.json", refuse=CheckpointError))
        self.step = int(saved["step"])
        client_state: dict[str, Any] = read_json(directory / "client.json", refuse=CheckpointError)
        return client_state

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the engine that loads it."""
        learner = self._learner
        return {
            "world_size": self._world_size,
            "zero_stage": learner.zero_stage,
            "dtype": learner.dtype,
            "compute_dtype": compute_dtype(learner),
        }

    def _sum_over_ranks(self, sums: DiagnosticSums) -> None:
        if self._world_size > 1:
            torch.distributed.all_reduce(sums.sums)
            torch.distributed.all_reduce(sums.ratio_max, torch.distributed.ReduceOp.MAX)


class _Clipper:
    """Clips by global norm just before the optimizer's step, and remembers the norm: at stage 0 DeepSpeed clips but
    does not report it."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self.norm = math.nan
        self._max_norm = max_norm or math.inf
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_norm))
