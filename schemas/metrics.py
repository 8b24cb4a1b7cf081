"""What a run reports: one record per learner step, evaluation or event, and the status of each process.

Invariant: these models are the only description of `metrics.jsonl` (one JSON object a line, told apart by
`event`) and of the status hashes on the hub; display, plots and summary read nothing else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Numbers gone wrong travel as the strings "NaN" and "Infinity", which JSON has no numbers for."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")
    time_ms: int = Field(description="Unix time")


class DriftRecord(BaseModel):
    """The drift of the tokens of one bucket of ages, from `age_from` up to the next bucket, and one sign of the advantage."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")
    age_from: int
    advantage: Literal["positive", "negative"]
    tokens: int
    ratio_mean: float
    ratio_max: float
    ratio_p99: float
    log_ratio_abs_mean: float
    log_ratio_abs_max: float
    kl_k1: float
    kl_k2: float
    kl_k3: float
    ess_token: float
    ess_sequence: float | None = None
    masked_fraction: float
    kept_mass: float
    entropy: float


class StepRecord(Record):
    event: Literal["step"] = "step"
    step: int = Field(description="optimizer steps done, this one included")
    steps_total: int
    epoch: int
    version: int = Field(description="policy version this step published")
    reward_mean: float = Field(description="mean reward of the batch's rollouts, zero-variance groups included")
    reward_std: float
    loss: float
    grad_norm: float
    lr: float
    groups: int = Field(description="groups in the batch")
    partial_groups: int = Field(default=0, description="of these, sent at their deadline with some of their rollouts")
    rollouts: int
    tokens: int = Field(description="completion tokens in the batch")
    zero_advantage_fraction: float = Field(description="share of groups whose rollouts all scored the same")
    age_tokens: dict[int, int] = Field(description="age (learner version − sampling version) -> tokens")
    in_flight_age_mean: float = Field(description="mean age gained between sampling and the group's last token")
    in_queue_age_mean: float = Field(description="mean age gained between the group's last token and training")
    in_flight_age_tokens: dict[str, dict[int, int]] = Field(
        default_factory=dict, description="region -> age gained between sampling and the group's last token -> tokens"
    )
    in_queue_age_tokens: dict[str, dict[int, int]] = Field(
        default_factory=dict, description="region -> age gained between the group's last token and training -> tokens"
    )
    ratio_mean: float
    ratio_max: float
    ratio_p99: float = 1.0
    log_ratio_abs_mean: float = 0.0
    log_ratio_abs_max: float = 0.0
    kl_k1: float
    kl_k2: float = 0.0
    kl_k3: float
    kl_k3_same_version: float | None = Field(default=None, description="over tokens of age 0: engine mismatch")
    ess_token: float = Field(description="effective sample size of the token ratios, 0..1")
    ess_sequence: float | None = Field(default=None, description="the same of the trajectories' ratios")
    masked_fraction: float = Field(description="tokens that the trust region or the veto kept from the loss")
    kept_mass: float
    entropy: float | None = None
    drift: list[DriftRecord] = Field(
        default_factory=list, description="the same figures by bucket of ages and sign of the advantage"
    )
    gates: list[str] = Field(
        default_factory=list, description="gates that this step did not pass, with value and bound"
    )
    skipped_groups: int = Field(default=0, description="groups whose update a gate kept from the weights")
    dropped: dict[str, int] = Field(default_factory=dict, description="groups dropped since the last step, by cause")
    wait_s: float = Field(description="waiting for the batch")
    step_s: float = Field(description="forward, backward, optimizer")
    publish_s: float = Field(
        description="the loop's wait for publishing: copying its weights, and for the version before"
    )
    checkpoint_s: float = Field(
        default=0.0,
        description="the loop's wait for checkpoints since the record before: what the last step's took is here",
    )
    committed_version: int | None = Field(
        default=None,
        description="newest version on the channel when this record was written: publishing goes on in the background, so "
        "most likely the one before this step's",
    )
    commit_s: float | None = Field(
        default=None, description="of that version: from the copy of its weights to its commit"
    )
    delta_bytes: int = Field(description="of that version's delta; 0 before the first one")
    full_bytes: int
    changed_fraction: float = Field(description="of that version's delta: share of elements that it changed")
    queue_depth: dict[str, int] = Field(
        default_factory=dict, description="region -> groups that the learner holds for a later batch"
    )
    pending: dict[str, int] = Field(
        default_factory=dict, description="region -> groups in its stream without a fate, when last counted"
    )
    tokens_per_s: dict[str, float] = Field(default_factory=dict, description="region -> tokens sampled per second")
    versions_served: dict[str, str] = Field(default_factory=dict, description="producer -> policy tag")
    eta_s: float | None = None


class EvaluationRecord(Record):
    event: Literal["evaluation"] = "evaluation"
    epoch: int
    version: int
    prompts: int
    mean_reward: float
    standard_error: float
    temperature: float
    seconds: float


class NoteRecord(Record):
    """Anything else worth a line: started, resumed, checkpoint, producer_lost, finished, ..."""

    event: Literal["note"] = "note"
    what: str
    detail: dict[str, str | int | float | bool | None] = Field(default_factory=dict)


AnyRecord = Annotated[StepRecord | EvaluationRecord | NoteRecord, Field(discriminator="event")]


class RegionCounts(BaseModel):
    """A region's ledger as the learner last read it."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    produced: int
    foreign: int = 0
    pending: int
    fates: dict[str, int] = Field(default_factory=dict)
    at_ms: int = Field(description="Unix time, the learner's clock")


class LearnerStatus(BaseModel):
    """The learner's line on the hub, refreshed at every change of state and at least every few seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    updated_ms: int
    state: str
    waiting_for: str = ""
    step: int
    steps_total: int
    epoch: int
    version: int
    regions: dict[str, str] = Field(default_factory=dict, description="region -> how reading it goes, and since when")
    ledger: dict[str, RegionCounts] = Field(default_factory=dict, description="region -> its last counts")
    alarms: tuple[str, ...] = Field(default=(), description="what is wrong with regions, ledger or fate log now")
    notes: tuple[str, ...] = Field(default=(), description="what is odd, though nothing is wrong")


class ProducerStatus(BaseModel):
    """A producer's line on the hub."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    updated_ms: int
    region: str
    pid: int
    state: str
    policy: str = Field(description="tag of the version served, '' before the first")
    served_since_ms: int = 0
    tokens_per_s: float = 0.0
    groups_done: int = 0
    groups_running: int = 0
    groups_partial: int = Field(default=0, description="sent at their deadline without all of their rollouts")
    groups_given_up: int = Field(default=0, description="at their deadline, with too few rollouts to be sent")
    groups_lost: int = Field(default=0, description="let go because their lease went to somebody else")
    groups_spooled: int = Field(default=0, description="finished, and not in the region's stream yet")
    rollouts_aborted: int = Field(default=0, description="at their deadline")
    rollouts_failed: int = Field(default=0, description="refused or given up by the engine")
    rollouts_retried: int = Field(default=0, description="started again, with another seed")
    rollouts_cut: int = Field(default=0, description="unfinished when their group ended")
    tokens_cut: int = Field(default=0, description="sampled for rollouts that were aborted or cut")
    swaps: int = 0
    last_swap_pause_ms: float = 0.0
    publish_to_serve_ms: float = Field(
        default=0.0, description="manifest published -> engine confirmed, of the last swap"
    )
    waiting_for: str = ""
    last_error: str = ""
    fetched_bytes: int = Field(default=0, description="weight chunks fetched by this producer since it started")
    last_fetched_bytes: int = Field(
        default=0, description="bytes of the way to the version served, whichever producer of the node fetched them"
    )
    last_path: str = Field(default="", description="manifests of that way, e.g. 'anchor e1.v40, skip2 e1.v42'")
    following: str = Field(default="", description="what the weight follower does")
    own_weights: str = Field(
        default="", description="why it shares no copy of the weights with its node, '' if it does"
    )
    verified_token: str = Field(default="", description="the request (RunBoard.request_verification) last answered")
    verified_policy: str = Field(default="", description="tag of the version the engine served when it was verified")
    verified_digest: str = Field(default="", description="root digest of the live engine's weights, hex")
    verify_error: str = Field(default="", description="why the digest could not be computed; '' if it was")
