"""The training engine: a causal language model under DeepSpeed, one optimizer step per batch.

Invariant: `train_step` is a function of the weights, the optimizer state and the batch alone: the same batch gives
the same bits, however its groups arrived; lr = 0 leaves every bit. With several ranks every method is collective:
all ranks call it with the same arguments. Held by tests/unit/learner/test_engine.py and
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from anabranch.learner import deepspeed_shim
from anabranch.learner.batch import TrainBatch
from anabranch.learner.deepspeed_config import (
    compute_dtype,
    deepspeed_json,
    uses_master_weights,
    what_deepspeed_refuses,
)
from anabranch.learner.deepspeed_files import guard_files
from anabranch.learner.distribute import init_ranks
from anabranch.learner.engine_files import Identity, load_engine, save_engine
from anabranch.learner.live_share import LiveShare
from anabranch.learner.model_costs import costs_of
from anabranch.learner.packed_attention import choose_attention, use_packed_attention
from anabranch.learner.policy import MasterWeights, PolicyModule, check_head, load_model
from anabranch.learner.quiet import import_deepspeed, quiet, without_deprecations
from anabranch.learner.random_state import seed_everything
from anabranch.learner.recompute import recompute_layers
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.row_layout import RowLayout
from anabranch.learner.schedule import learning_rate
from anabranch.learner.step import StepOutput, StepShare, plan_step
from anabranch.learner.step_gate import StepGate
from anabranch.learner.step_observer import StepObserver
from anabranch.learner.step_recorder import RecordedStep, StepRecorder
from anabranch.learner.update import Updater
from anabranch.learner.weights import PublishedWeights
from anabranch.schemas.config import CorrectionSection, GateSection, LearnerSection
from anabranch.schemas.errors import ConfigError
from anabranch.schemas.layout import Layout

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
        gates: GateSection | None = None,
        *,
        run_seed: int,
        temperature: float,
        max_tokens: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        recorder: StepRecorder | None = None,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        """Load the model and start DeepSpeed.

        Args:
            model_dir: Hugging Face checkpoint folder.
            temperature: at which rollouts are sampled; logits are divided by it.
            max_tokens: longest completion that can be sampled; the constant of aggregation "constant".
            rank, world_size: this process among the learner's ranks (see `distribute`).
            recorder: of this rank; writes the records that `train_share` is ordered to make.
            heartbeat: called before every microbatch, so that a long step is not taken for a hung one.

        Raises:
            ConfigError: settings that cannot work, named; the model cannot be loaded, or not be packed.
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
        self._recorder, self._heartbeat = recorder, heartbeat
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
        computed = DTYPES[compute_dtype(learner)]
        self._rows = RowLayout()
        if learner.packing:
            use_packed_attention(policy, choose_attention(learner.attention, device=learner.device, dtype=computed))
            self._rows = RowLayout(True, learner.share_prompts, costs_of(policy.lm))
        if learner.gradient_checkpointing:
            recompute_layers(policy.lm, replaced_weights=masters)
        self._vocabulary = int(policy.lm.get_input_embeddings().weight.shape[0])
        self._weights = PublishedWeights(policy.lm)
        module: torch.nn.Module = policy
        if masters:
            module = MasterWeights(policy, stored, computed)
        for parameter in policy.head_logprobs.external_parameters():
            deepspeed.zero.register_external_parameter(policy.head_logprobs, parameter)
        with quiet(), what_deepspeed_refuses():
            self._engine, *_ = deepspeed.initialize(
                model=module, model_parameters=list(module.parameters()), config=settings
            )
        guard_files(self._engine)
        gate = StepGate(self._engine.optimizer, zero_stage=learner.zero_stage, max_norm=learner.grad_clip)
        self._updater = Updater(
            self._engine, gate, correction, gates or GateSection(),
            world_size=world_size, device=torch.device(self._engine.device), heartbeat=heartbeat,
        )  # fmt: skip
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
        """Learning rate of the update that leads to `step` (1, 2, ...)."""
        return learning_rate(step, self._learner)

    def plan(self, batch: TrainBatch) -> list[StepShare]:
        """Each rank's share of a step on `batch`. No rank needs more than its own."""
        learner = self._learner
        return plan_step(
            batch, self._correction, budget_tokens=learner.micro_batch_tokens,
            ranks=self._world_size, max_tokens=self._max_tokens, updates=learner.updates_per_step,
            layout=self._rows,
        )  # fmt: skip

    def train_step(self, batch: TrainBatch) -> StepOutput:
        """`train_share` where every rank holds the whole batch."""
        return self.train_share(self.plan(batch)[self._rank])

    def train_share(self, share: StepShare, order: RecordOrder | None = None) -> StepOutput:
        """One step; `share` is this rank's of `plan`. It is recorded if there is an order and a recorder, also if a gate stops it.

        Raises:
            GateError: a gate says stop, or loss or gradient is not finite (unless `gates.non_finite_action` is skip). Nothing
                has been published or saved of it.
        """
        step = self.step + 1
        lr = self.learning_rate(step)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        observer = None if order is None or self._recorder is None else StepObserver(self._correction)
        started = time.monotonic()
        try:
            with without_deprecations():
                outputs = list(self._updater.run(share, step=step, observer=observer))
        finally:
            if order is not None and observer is not None and observer.updates:
                self._record(share, order, observer, lr=lr, step_s=time.monotonic() - started)
        self.step = step
        facts = [update.facts for update in share.updates]
        skipped = [f.group_indices for f, output in zip(facts, outputs, strict=True) if not output.applied]
        return StepOutput(
            step=step, loss=outputs[0].loss, grad_norm=outputs[0].grad_norm, lr=lr, diagnostics=outputs[0].diagnostics,
            zero_variance_groups=tuple(itertools.chain(*(f.zero_variance_groups for f in facts))),
            groups=sum(len(f.group_indices) for f in facts), skipped_groups=tuple(itertools.chain(*skipped)),
            alarms=tuple(itertools.chain(*(output.alarms for output in outputs))),
        )  # fmt: skip

    def _record(
        self, share: StepShare, order: RecordOrder, observer: StepObserver, *, lr: float, step_s: float
    ) -> None:
        assert self._recorder is not None
        facts = [update.facts for update in share.updates]
        self._recorder.put(RecordedStep(order, facts, observer.updates, lr, time.time_ns() // 1_000_000, step_s))

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
        identity = self._identity
        save_engine(self._engine, directory, client_state, rank=self._rank, step=self.step, identity=identity)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote; returns its `client_state`. Call it on a new engine.

        Raises:
            CheckpointError: written with dtypes or a ZeRO stage from which this engine cannot go on; or a file cannot be
                read.
        """
        self.step, client_state = load_engine(
            self._engine, directory, rank=self._rank, identity=self._identity, heartbeat=self._heartbeat
        )
        return client_state

    @property
    def _identity(self) -> Identity:
        learner = self._learner
        return Identity(self._world_size, learner.zero_stage, learner.dtype, compute_dtype(learner))
