"""Real engines, one of each kind per session: Qwen3 with tied embeddings that recomputes KV at a swap, Llama with
untied ones that keeps it. Between them they have every fusion (q/k/v, gate/up) and q/k norms."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Literal

import pytest

from anabranch.producers.engine import RolloutEngine
from anabranch.producers.mirror import Mirror
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError
from tests.e2e.lab import TEMPERATURE, Lab
from tests.tiny import EOS_ID, OTHER_EOS_ID, build_checkpoint

MAX_SEQS = 8
# What an instruction model ships with; none of it may touch sampling here, except the end-of-sequence ids.
GENERATION_CONFIG = {
    "do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5,
    "eos_token_id": [EOS_ID, OTHER_EOS_ID],
}  # fmt: skip


def _lab(
    tmp: pytest.TempPathFactory, family: Literal["qwen3", "llama"], tied: bool, kv: Literal["keep", "recompute"]
) -> Iterator[Lab]:
    model_dir = build_checkpoint(tmp.mktemp(f"{family} model"), family=family, tied=tied)
    if family == "llama":
        (model_dir / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    config = ProducerSection(max_model_len=640, max_num_seqs=MAX_SEQS, kv_policy=kv, kv_cache_bytes=32 * 2**20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM's own start-up; our steps and swaps run with errors on
        warnings.simplefilter("ignore", DeprecationWarning)
        engine = RolloutEngine(model_dir, config, SamplingSection(temperature=TEMPERATURE), seed=0)
    with pytest.raises(AnabranchError) as refused:
        engine.submit("early", [1, 2, 3], seed=0)
    assert engine.policy is None
    lab = Lab(model_dir, engine, Mirror.from_checkpoint(model_dir), str(refused.value), two_ends=family == "llama")
    lab.begin(0)
    yield lab
    engine.close()


@pytest.fixture(scope="session")
def qwen_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield from _lab(tmp_path_factory, "qwen3", True, "recompute")


@pytest.fixture(scope="session")
def llama_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield from _lab(tmp_path_factory, "llama", False, "keep")


@pytest.fixture
def recompute_lab(qwen_session: Lab) -> Iterator[Lab]:
    """Qwen3, tied embeddings, kv_policy = recompute; idle before and after."""
    yield qwen_session
    _idle(qwen_session)


@pytest.fixture
def keep_lab(llama_session: Lab) -> Iterator[Lab]:
    """Llama, untied embeddings, kv_policy = keep; idle before and after."""
    yield llama_session
    _idle(llama_session)


@pytest.fixture(params=["recompute_lab", "keep_lab"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """Both, one after the other."""
    chosen: Lab = request.getfixturevalue(request.param)
    return chosen


def _idle(lab: Lab) -> None:
    lab.engine.abort([f"{p}{i}" for p in ("r", "s", "t") for i in range(64)])
    assert not lab.engine.has_unfinished
