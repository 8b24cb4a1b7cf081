"""A tiny random Qwen3 and groups that it could have sampled, for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.learner.batch import TrainBatch, build_batch
from anabranch.learner.engine import LearnerEngine
from anabranch.schemas.config import CorrectionSection, GateSection, LearnerSection
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

VOCAB = 64
NOW = PolicyVersion(0, 3)


def save_qwen3(directory: Path, *, tied: bool = True, seed: int = 0, **overrides: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    } | overrides  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=tied, initializer_range=0.2))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def save_qwen3_moe(directory: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_group(index: int, *, samples: int = 4, reward: Callable[[int], float] | None = None, seed: int = 0) -> Group:
    """Random tokens of lengths that differ; log-probs near uniform; ages 0 to 3 at `NOW`."""
    rng = np.random.default_rng([seed, index])
    reward = reward or (lambda s: float(s % 2))
    rollouts = []
    for s in range(samples):
        tokens = int(rng.integers(3, 10))
        rollouts.append(
            Rollout(
                s, rng.integers(0, VOCAB, tokens).astype(np.int32),
                (-np.log(VOCAB) + 0.3 * rng.standard_normal(tokens)).astype(np.float32).clip(max=0),
                (VersionSpan(PolicyVersion(0, index % 3), 0), VersionSpan(NOW, 2)), reward(s), "stop", "", 0, 0,
            )
        )  # fmt: skip
    prompt = rng.integers(0, VOCAB, 3 + index % 4).astype(np.int32)
    return Group("run", "east", "p", index, 0, prompt, "", "", tuple(rollouts))


def make_batch(indices: list[int] | range = range(4), **kwargs: object) -> TrainBatch:
    return build_batch([make_group(i, **kwargs) for i in indices], now=NOW, forks={}, max_age=8)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp("models") / "moe")


OPEN = GateSection(mismatch_action="off", ess_action="off", ess_sequence_action="off", ratio_mean_action="off")


@pytest.fixture
def engine(model_dir: Path) -> Callable[..., LearnerEngine]:
    """Builds an engine; keywords are those of `LearnerSection`, and `correction`, `gates`, `model_dir`, `temperature`."""

    def build(
        *,
        correction: CorrectionSection | None = None,
        model_dir: Path = model_dir,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        gates: GateSection | None = None,
        **learner: object,
    ) -> LearnerEngine:
        section = LearnerSection(**({"lr": 1e-3, "micro_batch_tokens": 64} | learner))  # type: ignore[arg-type]
        # Random weights meet random rollouts here, so ratios are wild: no veto.
        correction = correction or CorrectionSection(veto_low=0.0, veto_high=1e9)
        return LearnerEngine(
            model_dir, section, correction, gates or OPEN, run_seed=0, temperature=temperature, max_tokens=max_tokens
        )

    return build
