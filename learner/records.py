"""From a finished step to its line in metrics.jsonl. Pure."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from anabranch.learner.batch import TrainBatch
from anabranch.learner.feed import FedBatch
from anabranch.learner.publish_order import Published
from anabranch.learner.step import StepOutput
from anabranch.schemas.config import RunConfig
from anabranch.schemas.metrics import ProducerStatus, StepRecord
from anabranch.schemas.versions import PolicyVersion


def step_record(
    config: RunConfig,
    policy: PolicyVersion,
    fed: FedBatch,
    batch: TrainBatch,
    output: StepOutput,
    published: Published | None,
    *,
    full_bytes: int,
    producers: Mapping[str, ProducerStatus],
    queue_depth: Mapping[str, int],
    pending: Mapping[str, int],
    elapsed_s: float,
    steps_here: int,
    step_s: float,
    publish_s: float,
    checkpoint_s: float,
) -> StepRecord:
    """`published` is the newest version that is committed by now: most likely the one before this step's. `elapsed_s`
    since this learner started, in which it did `steps_here` steps: the ETA extrapolates from them."""
    tokens_per_s: dict[str, float] = defaultdict(float)
    for status in producers.values():
        tokens_per_s[status.region] += status.tokens_per_s
    delta = published if published is not None and published.manifest.kind == "delta" else None
    in_flight, in_queue = batch.mean_ages()
    diagnostics = output.diagnostics
    return StepRecord(
        time_ms=time.time_ns() // 1_000_000,
        step=output.step,
        steps_total=config.learner.steps,
        epoch=policy.epoch,
        version=policy.version,
        reward_mean=float(batch.rewards.mean()),
        reward_std=float(batch.rewards.std()),
        loss=output.loss,
        grad_norm=output.grad_norm,
        lr=output.lr,
        groups=output.groups,
        partial_groups=sum(arrival.group.partial for arrival in fed.arrivals),
        rollouts=len(batch.rewards),
        tokens=batch.tokens,
        zero_advantage_fraction=output.zero_advantage_fraction,
        age_tokens=batch.age_histogram(),
        in_flight_age_mean=in_flight,
        in_queue_age_mean=in_queue,
        ratio_mean=diagnostics.ratio_mean,
        ratio_max=diagnostics.ratio_max,
        kl_k1=diagnostics.kl_k1,
        kl_k3=diagnostics.kl_k3,
        kl_k3_same_version=diagnostics.kl_k3_same_version,
        ess_token=diagnostics.ess_token,
        masked_fraction=diagnostics.masked_fraction,
        kept_mass=diagnostics.kept_mass,
        entropy=diagnostics.entropy,
        dropped=fed.dropped,
        wait_s=fed.wait_s,
        step_s=step_s,
        publish_s=publish_s,
        checkpoint_s=checkpoint_s,
        committed_version=published.version if published else None,
        commit_s=published.seconds if published else None,
        delta_bytes=delta.payload_bytes if delta else 0,
        full_bytes=full_bytes,
        changed_fraction=delta.changed_fraction if delta else 0.0,
        queue_depth=dict(queue_depth),
        pending=dict(pending),
        tokens_per_s=dict(tokens_per_s),
        versions_served={name: status.policy for name, status in producers.items()},
        eta_s=elapsed_s / steps_here * (config.learner.steps - output.step) if steps_here else None,
    )
