"""The configuration of a run, as frozen models: every key, its unit, its default and its bounds.

Invariant: a `RunConfig` that exists is valid. All checks, cross-field ones included, run when it is built, so
nothing needed at the end of a run is found missing then. Unknown keys are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from anabranch.schemas.config.channel import ChannelSection
from anabranch.schemas.config.correction import CorrectionSection, GateSection
from anabranch.schemas.config.delivery import LedgerSection, RecorderSection, SpoolSection, StreamSection
from anabranch.schemas.config.learner import LearnerSection
from anabranch.schemas.config.section import Dtype, Section
from anabranch.schemas.errors import UnsafeSamplingError, redact_url

ENTRY_BYTES_PER_MS = 12_500  # 100 Mbit/s: a producer's link to its region's Redis
ENTRY_BYTES_PER_TOKEN = 24  # id, log-prob and up to 16 bytes of text; more is very rare


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
    min_group_size: int | None = Field(
        None, ge=2, description="rollouts with which a group may be sent once its deadline has passed; default: all"
    )
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
    rollout_deadline_s: float = Field(
        120.0, gt=0, description="a rollout that takes longer is aborted and sampled again, with another seed"
    )
    group_deadline_s: float = Field(
        300.0,
        gt=0,
        description="a group that takes longer is sent with the rollouts that are finished (sampling.min_group_size), or given up",
    )
    max_attempts: int = Field(
        3, ge=1, description="a group index given up so often is abandoned: another prompt takes its place"
    )
    verify_every_updates: int = Field(
        0,
        ge=0,
        description="check the live engine's digest every N swaps, which ends a producer that differs; 0: never",
    )


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
    gates: GateSection = Field(default_factory=GateSection)
    channel: ChannelSection = Field(default_factory=ChannelSection)
    stream: StreamSection = Field(default_factory=StreamSection)
    spool: SpoolSection = Field(default_factory=SpoolSection)
    ledger: LedgerSection = Field(default_factory=LedgerSection)
    recorder: RecorderSection = Field(default_factory=RecorderSection)

    @property
    def spool_directory(self) -> Path:
        """Of this run alone: whoever finds a spool there sends it to this run's stream."""
        return self.spool.dir / self.run.name if self.spool.dir else self.run.directory / "spool"

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
        if (self.sampling.min_group_size or 0) > self.sampling.group_size:
            raise ValueError(
                f"sampling.min_group_size = {self.sampling.min_group_size} exceeds "
                f"sampling.group_size = {self.sampling.group_size}"
            )
        if self.producer.rollout_deadline_s > self.producer.group_deadline_s:
            raise ValueError(
                f"producer.rollout_deadline_s = {self.producer.rollout_deadline_s} exceeds "
                f"producer.group_deadline_s = {self.producer.group_deadline_s}"
            )
        if self.stream.max_entry_bytes > self.spool.max_bytes:
            raise ValueError(
                f"stream.max_entry_bytes = {self.stream.max_entry_bytes} exceeds spool.max_bytes = {self.spool.max_bytes}: "
                "a group could never be spooled"
            )
        sendable = self.stream.socket_timeout_ms * ENTRY_BYTES_PER_MS
        if self.stream.max_entry_bytes > sendable:
            raise ValueError(
                f"stream.max_entry_bytes = {self.stream.max_entry_bytes} exceeds the {sendable} bytes that 100 Mbit/s carry "
                f"within stream.socket_timeout_ms = {self.stream.socket_timeout_ms}: a longer time-out, or smaller entries"
            )
        largest = self.sampling.group_size * need * ENTRY_BYTES_PER_TOKEN + 8192
        if largest > self.stream.max_entry_bytes:
            raise ValueError(
                f"a group of sampling.group_size = {self.sampling.group_size} rollouts of {need} tokens can take "
                f"{largest} bytes, more than stream.max_entry_bytes = {self.stream.max_entry_bytes}"
            )
        return self
