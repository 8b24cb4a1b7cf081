"""From a finished step to its line in metrics.jsonl. Pure."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict

from anabranch.kernels.diagnostics import Drift
from anabranch.learner.batch import TrainBatch
from anabranch.learner.feed import FedBatch
from anabranch.learner.publish_order import Published
from anabranch.learner.step import StepOutput
from anabranch.schemas.config import RunConfig
from anabranch.schemas.metrics import DriftRecord, ProducerStatus, StepRecord
from anabranch.schemas.versions import PolicyVersion

NO_DRIFT = Drift(
    tokens=0, ratio_mean=1.0, ratio_max=1.0, ratio_p99=1.0, log_ratio_abs_mean=0.0, log_ratio_abs_max=0.0, kl_k1=0.0, kl_k2=0.0,
    kl_k3=0.0, ess_token=1.0, ess_sequence=None, masked_fraction=0.0, kept_mass=0.0, entropy=0.0,
)  # fmt: skip
AgeTokens = dict[str, dict[int, int]]


def age_tokens(fed: FedBatch, batch: TrainBatch) -> tuple[AgeTokens, AgeTokens]:
    """By region: tokens by the age they gained in flight, and by that gained in the queue."""
    region_of = {arrival.group.group_index: arrival.region for arrival in fed.arrivals}
    regions = [region_of[index] for index in batch.group_indices.tolist()]
    in_flight: dict[str, Counter[int]] = defaultdict(Counter)
    in_queue: dict[str, Counter[int]] = defaultdict(Counter)
    for row, (group, queue_age, length) in enumerate(
        zip(batch.group.tolist(), batch.queue_ages.tolist(), batch.lengths.tolist(), strict=True)
    ):
        in_queue[regions[group]][queue_age] += length
        in_flight[regions[group]].update((batch.ages[row, :length] - queue_age).tolist())
    return {region: dict(c) for region, c in in_flight.items()}, {region: dict(c) for region, c in in_queue.items()}


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
    total = output.diagnostics.total or NO_DRIFT
    same_version = output.diagnostics.same_version
    in_flight_tokens, in_queue_tokens = age_tokens(fed, batch)
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
        in_flight_age_tokens=in_flight_tokens,
        in_queue_age_tokens=in_queue_tokens,
        ratio_mean=total.ratio_mean,
        ratio_max=total.ratio_max,
        ratio_p99=total.ratio_p99,
        log_ratio_abs_mean=total.log_ratio_abs_mean,
        log_ratio_abs_max=total.log_ratio_abs_max,
        kl_k1=total.kl_k1,
        kl_k2=total.kl_k2,
        kl_k3=total.kl_k3,
        kl_k3_same_version=same_version.kl_k3 if same_version else None,
        ess_token=total.ess_token,
        ess_sequence=total.ess_sequence,
        masked_fraction=total.masked_fraction,
        kept_mass=total.kept_mass,
        entropy=total.entropy if total.tokens else None,
        drift=[
            DriftRecord.model_validate({"age_from": start, "advantage": sign} | asdict(drift))
            for (start, sign), drift in output.diagnostics.cells.items()
        ],
        gates=[str(alarm) for alarm in output.alarms],
        skipped_groups=len(output.skipped_groups),
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
