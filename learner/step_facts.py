"""The facts of a finished step, as its record tells them. Pure.

Invariant: `settings` holds every key of the configuration that decides the arithmetic of a step (and some that do not), and
`config_digest` is the same exactly where `settings` is. Held by tests/unit/learner/test_step_facts.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import blake3

from anabranch.learner.deepspeed_config import compute_dtype
from anabranch.learner.machine_facts import MachineFacts
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.schemas.config import RunConfig
from anabranch.schemas.step_record import StepFacts
from anabranch.schemas.versions import PolicyVersion


def step_facts(
    config: RunConfig,
    order: RecordOrder,
    updates: Sequence[UpdateFacts],
    seen: Sequence[SeenUpdate],
    machine: MachineFacts,
    *,
    lr: float,
    time_ms: int,
    step_s: float,
) -> StepFacts:
    """Args: updates, seen: as in `step_rows.rank_rows`, at least one was seen; time_ms: Unix time of the step's end."""
    first, learner = seen[0].result, config.learner
    settings = arithmetic_settings(config)
    skipped = [u.group_indices for u, s in itertools.zip_longest(updates, seen) if s is None or not s.result.applied]
    return StepFacts(
        run=config.run.name,
        epoch=order.epoch,
        version_before=order.version,
        step=order.version + 1,
        now=str(PolicyVersion(order.epoch, order.version)),
        forks=order.forks,
        time_ms=time_ms,
        step_s=step_s,
        lr=lr,
        loss=first.loss,
        loss_bits=first.loss_bits,
        grad_norm=first.grad_norm,
        grad_norm_bits=first.grad_norm_bits,
        updates=[one.result for one in seen],
        groups=list(order.groups),
        zero_variance=[index for u in updates for index in u.zero_variance_groups],
        skipped=list(itertools.chain(*skipped)),
        alarms=list(itertools.chain(*(one.alarms for one in seen))),
        settings=settings,
        config_digest=digest_of(settings),
        world_size=learner.world_size,
        zero_stage=learner.zero_stage,
        dtype=learner.dtype,
        compute_dtype=compute_dtype(learner),
        device=learner.device,
        threads=learner.threads,
        packages=machine.packages,
        cpu=machine.cpu,
        gpu=machine.gpu,
        tokens=config.recorder.tokens,
    )


def arithmetic_settings(config: RunConfig) -> dict[str, Any]:
    """The sections that decide the arithmetic, whole: telling too much does no harm."""
    sections = {name: getattr(config, name).model_dump(mode="json") for name in ("learner", "correction", "gates")}
    return {
        **sections,
        "run": {"seed": config.run.seed},
        "sampling": {"temperature": config.sampling.temperature, "max_tokens": config.sampling.max_tokens},
    }


def digest_of(settings: dict[str, Any]) -> str:
    """BLAKE3 of the canonical JSON, 32 hex digits."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return str(blake3.blake3(text.encode()).hexdigest(length=16))
