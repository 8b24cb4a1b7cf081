"""The configuration of a run, as frozen models: every key, its unit, its default and its bounds.

Invariant: a `RunConfig` that exists is valid. All checks, cross-field ones included, run when it is built, so
nothing needed at the end of a run is found missing then. Unknown keys are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from anabranch.schemas.config import channel_rules, learner_rules
from anabranch.schemas.errors import UnsafeSamplingError, redact_url

Dtype = Literal["float32", "bfloat16", "float16"]
ENTRY_BYTES_PER_TOKEN = 24  # id, log-prob and up to 16 bytes of text; more is very rare
Objective = Literal["dppo_tv", "grpo", "dr_grpo", "none"]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class RunSection(Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="names the run directory and the Redis keys"
    )
    dir: Path = Field(Path("runs"), strict=False, description="parent of the run directory")
    seed: int = Field(0, ge=0, lt=2**31, description="seeds prompts, sampling, initial state")

    @property
    def directory(self) -> Path:
        return self.dir / self.name


class ModelSection(Section):
    path: Path = Field(
        Path("model"), strict=False, description="Hugging Face checkpoint folder (config, tokenizer, safetensors)"
    )


class RedisSection(Section):
    url: str = Field(
        "redis://127.0.0.1:6379/0", description="redis:// or rediss:// URL; a password in it is never shown"
    )

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        return _redis_url(url)


class RegionSection(RedisSection):
    weights_url: str | None = Field(
        None,
        description="Redis from which this region's producers read weights: a replica of the hub nearby; "
        "default: the hub itself",
    )

    @field_validator("weights_url")
    @classmethod
    def _known_weights_scheme(cls, url: str | None) -> str | None:
        return None if url is None else _redis_url(url)


def _redis_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(f"{redact_url(url)!r} is not a redis://, rediss:// or unix:// URL")
    return url


class TaskSection(Section):
    """A `reasoning-gym` dataset: prompts by index, answers scored by its own scorer and required exact."""

    dataset: str = Field("chain_sum", description="name of a reasoning-gym generator")
    params: dict[str, int | float | bool | str | list[Any]] = Field(
        default_factory=dict, description="keyword arguments of the generator"
    )
    prompt: str = Field("{question}", description="template around the question")
    system: str = Field("", description="system message; used only with chat_template")
    chat_template: bool = Field(False, description="wrap the prompt with the tokenizer's chat template")
    question_pattern: str = Field(
        "", description="regular expression whose first group becomes {question}; empty: the whole question"
    )
    answer_pattern: str = Field(
        "", description="regular expression whose first group is the answer; empty: the whole text, stripped"
    )
    max_prompt_tokens: int = Field(256, ge=1)
    heldout_size: int = Field(200, ge=1, description="fixed held-out prompts, from their own seed; never trained on")
    heldout_temperature: float = Field(
        1.0, ge=0, description="sampling temperature of the held-out evaluation; 0 is greedy"
    )


class SamplingSection(Section):
    """How rollouts are sampled. Anything that truncates or reshapes the distribution is refused: the recorded
    log-prob must be that of the distribution that was sampled."""

    group_size: int = Field(8, ge=2, le=1024, description="rollouts per prompt (G)")
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0, le=5)
    top_p: float = 1.0
    top_k: int = Field(-1, description="-1: off")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @model_validator(mode="after")
    def _only_the_true_distribution(self) -> Self:
        safe = {
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        unsafe = [f"{k} = {getattr(self, k)} (must be {v})" for k, v in safe.items() if getattr(self, k) != v]
        if self.top_k > 0:
            unsafe.append(f"top_k = {self.top_k} (must be -1)")
        if unsafe:
            raise UnsafeSamplingError(
                "sampling settings make the recorded log-probs those of another distribution: " + ", ".join(unsafe)
            )
        return self


class ProducerSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = Field("float32", description="engine compute dtype; weights arrive as the checkpoint's dtype")
    tensor_parallel_size: int = Field(1, ge=1)
    max_model_len: int = Field(512, ge=8)
    max_num_seqs: int = Field(64, ge=1, description="sequences decoded together")
    kv_cache_bytes: int = Field(64 * 2**20, ge=2**20, description="CPU and GPU: KV cache size in bytes; set explicitly")
    groups_in_flight: int = Field(8, ge=1, description="groups sampled at once; also the size of a permit block")
    poll_ms: int = Field(50, ge=1, description="how often the weight channel's head is polled")
    kv_policy: Literal["keep", "recompute", "new_requests_only"] = Field(
        "keep",
        description="running requests at a swap: keep their KV, recompute it, or end under the old weights first "
        "(new_requests_only: the swap waits for them)",
    )
    node_dir: Path | None = Field(
        None,
        strict=False,
        description="where producers of one node find each other, to share one copy of the weights; "
        "default: /dev/shm/anabranch-UID",
    )
    permit_lease_ms: int = Field(60_000, ge=1_000, description="a permit not settled by then goes to somebody else")
    rollout_deadline_s: float = Field(300.0, gt=0)
    append_deadline_s: float = Field(
        120.0, gt=0, description="how long an unreachable region Redis is retried before exit 75"
    )
    verify_every_updates: int = Field(
        0,
        ge=0,
        description="check the live engine's digest every N swaps, which ends a producer that differs; 0: never",
    )


# What an objective's paper pairs it with: used for the keys that the user leaves out.
_OBJECTIVE_DEFAULTS: dict[str, dict[str, str | float]] = {
    "dppo_tv": {"advantage": "dr_grpo", "aggregation": "token_mean", "penalty": 1e-3},
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "penalty": 0.0},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant", "penalty": 0.0},
    "none": {"advantage": "dr_grpo", "aggregation": "token_mean", "penalty": 0.0},
}


class CorrectionSection(Section):
    """Off-policy correction, see docs/staleness.md. `grpo` and `dr_grpo` share one clipped objective; they differ in
    the defaults of advantage, aggregation and penalty (as do the others: `_OBJECTIVE_DEFAULTS`)."""

    objective: Objective = "dppo_tv"
    max_age: int = Field(
        8, ge=0, description="hard bound: a group with an older token never reaches the loss; 0 is synchronous"
    )
    tau: float = Field(0.2, gt=0, description="dppo_tv: trust region on the probability difference")
    ratio_cap: float = Field(20.0, gt=0, description="dppo_tv: cap on the importance ratio")
    penalty: float = Field(
        1e-3, ge=0, description="weight of the d² penalty; default 0 for objectives other than dppo_tv"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="grpo, dr_grpo: lower clip")
    clip_high: float = Field(0.28, gt=0, description="grpo, dr_grpo: upper clip")
    veto_low: float = Field(1e-4, ge=0, description="a trajectory with any ratio below is dropped from the loss")
    veto_high: float = Field(100.0, gt=1, description="a trajectory with any ratio above is dropped from the loss")
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "dr_grpo"
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return _OBJECTIVE_DEFAULTS.get(str(values.get("objective", "dppo_tv")), {}) | values


class LearnerSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = Field("bfloat16", description="weights as published; the optimizer keeps float32 masters")
    compute_dtype: Dtype | None = Field(
        None,
        description="of forward and backward. float32 with dtype bfloat16 computes in float32 with the published bf16 "
        "weights. Default: float32 on the CPU at zero_stage 0 to 2 (exact, and faster than bf16 there), else as dtype",
    )
    steps: int = Field(100, ge=1)
    groups_per_step: int = Field(32, ge=1, description="B: groups consumed by one optimizer step")
    micro_batch_tokens: int = Field(8192, ge=16, description="padded tokens of one forward pass")
    world_size: int = Field(1, ge=1, le=64)
    zero_stage: Literal[0, 1, 2, 3] = 1
    lr: float = Field(1e-5, ge=0)
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="0: off")
    checkpoint_every: int = Field(
        20, ge=1, description="steps between durable checkpoints; entries are acknowledged after one"
    )
    keep_checkpoints: int = Field(2, ge=1)
    batch_deadline_s: float = Field(600.0, gt=0, description="how long a step waits for its batch before exit 75")
    evaluate: bool = Field(True, description="held-out evaluation before the first and after the last step")
    evaluate_deadline_s: float = Field(300.0, gt=0)
    threads: int = Field(1, ge=1, description="CPU threads per rank")
    target_reward: float | None = Field(None, description="stop early when the smoothed mean reward reaches it")
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="merged over the generated DeepSpeed JSON")

    @field_validator("betas", mode="before")
    @classmethod
    def _tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @property
    def resolved_compute_dtype(self) -> str:
        return learner_rules.compute_dtype(
            self.compute_dtype, device=self.device, dtype=self.dtype, zero_stage=self.zero_stage
        )

    @model_validator(mode="after")
    def _what_the_learner_can_do(self) -> Self:
        learner_rules.check_dtypes(dtype=self.dtype, compute=self.resolved_compute_dtype, zero_stage=self.zero_stage)
        learner_rules.check_deepspeed(self.deepspeed)
        return self


class ChannelSection(Section):
    blobs: str = Field(
        "redis",
        description="where weight chunks are kept: redis (the hub), or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://ACCOUNT/CONTAINER/PREFIX, file:///DIR; "
        "credentials come from the environment (AWS_ACCESS_KEY_ID, ...), never from here",
    )
    blob_options: dict[str, str] = Field(
        default_factory=dict, description="options of the object store, e.g. endpoint, region, allow_http"
    )
    region_cache_bytes: int = Field(
        0,
        ge=0,
        description="keep chunks of an object store in the region's Redis, up to so many bytes, so that they cross the "
        "WAN once for all its producers; 0: off",
    )
    codec_threads: int = Field(
        2, ge=1, le=256, description="threads of the delta codec, in the learner and in producers"
    )
    fetch_threads: int = Field(
        64, ge=1, le=256, description="chunks fetched at once by a follower: over a WAN each costs a round trip"
    )
    skip_levels: int = Field(
        10,
        ge=0,
        le=20,
        description="merged deltas over 2, 4, ... 2^N versions are published in the background; 0: none",
    )
    skip_memory_bytes: int = Field(
        2 * 2**30,
        ge=0,
        description="memory of a learner rank for making skip deltas; longer skips are left out above it",
    )
    retain_bytes: int = Field(
        4 * 2**30,
        ge=0,
        description="bytes on the channel (chunks, and 16 KiB for each manifest) above which what no follower can need is "
        "dropped",
    )
    lease_ms: int = Field(
        120_000, ge=1_000, description="a follower that has not reported for so long may find its versions dropped"
    )
    signing_key_file: Path | None = Field(
        None, strict=False, description="learner: Ed25519 private key (PEM) that signs manifests"
    )
    trusted_keys: tuple[str, ...] = Field(
        (), description="producers: Ed25519 public keys (hex); if any, manifests must be signed by one of them"
    )
    connect_deadline_s: float = Field(60.0, gt=0)

    @field_validator("trusted_keys", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError('a list of Ed25519 public keys of 64 hex digits each, such as ["ab12..."]')
        return tuple(value)

    @field_validator("trusted_keys")
    @classmethod
    def _hex_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            channel_rules.check_trusted_key(key)
        return keys

    @field_validator("blobs")
    @classmethod
    def _known_store(cls, blobs: str) -> str:
        channel_rules.check_blobs(blobs)
        return blobs

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        channel_rules.check_blob_options(self.blobs, self.blob_options)
        return self


class StreamSection(Section):
    max_entry_bytes: int = Field(16 * 2**20, ge=1024)
    block_ms: int = Field(200, ge=1, description="blocking read; kept below socket_timeout_ms")
    socket_timeout_ms: int = Field(5_000, ge=100)
    claim_idle_ms: int = Field(60_000, ge=1_000, description="entries of a dead consumer are claimed after this")
    max_deliveries: int = Field(32, ge=1, description="an entry delivered more often goes to the dead-letter stream")

    @model_validator(mode="after")
    def _block_below_timeout(self) -> Self:
        if self.block_ms >= self.socket_timeout_ms:
            raise ValueError(f"block_ms = {self.block_ms} must be below socket_timeout_ms = {self.socket_timeout_ms}")
        return self


class RecorderSection(Section):
    rows_per_file: int = Field(4096, ge=1)
    seconds_per_file: float = Field(20.0, gt=0)


class RunConfig(Section):
    """The whole configuration. `regions` maps a region's name to its Redis."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    hub: RedisSection = Field(default_factory=RedisSection)
    regions: dict[str, RegionSection] = Field(default_factory=lambda: {"local": RegionSection()})
    task: TaskSection = Field(default_factory=TaskSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    producer: ProducerSection = Field(default_factory=ProducerSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    correction: CorrectionSection = Field(default_factory=CorrectionSection)
    channel: ChannelSection = Field(default_factory=ChannelSection)
    stream: StreamSection = Field(default_factory=StreamSection)
    recorder: RecorderSection = Field(default_factory=RecorderSection)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.regions:
            raise ValueError("regions is empty: name at least one, e.g. regions.local.url")
        for name in self.regions:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,99}", name):
                raise ValueError(f"region name {name!r}: letters, digits, '-' and '_' only")
        need = self.task.max_prompt_tokens + self.sampling.max_tokens
        if need > self.producer.max_model_len:
            raise ValueError(
                f"task.max_prompt_tokens + sampling.max_tokens = {need} exceeds "
                f"producer.max_model_len = {self.producer.max_model_len}"
            )
        largest = self.sampling.group_size * need * ENTRY_BYTES_PER_TOKEN + 8192
        if largest > self.stream.max_entry_bytes:
            raise ValueError(
                f"a group of sampling.group_size = {self.sampling.group_size} rollouts of {need} tokens can take "
                f"{largest} bytes, more than stream.max_entry_bytes = {self.stream.max_entry_bytes}"
            )
        return self
