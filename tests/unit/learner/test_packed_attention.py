"""Packed rows through Hugging Face models of several families, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.kernels.segments import NO_PARENT
from anabranch.learner import packed_attention
from anabranch.learner.packed_attention import choose_attention, use_packed_attention
from anabranch.learner.policy import PolicyModule, load_model
from anabranch.schemas.errors import ConfigError
from tests.unit.learner.conftest import VOCAB

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip

QWEN2_MOE = {
    "max_window_layers": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def build(family: str, **overrides: Any) -> PolicyModule:
    config = getattr(transformers, f"{family}Config")(**(SHAPE | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return PolicyModule(lm, 1.0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": None}),
        ("Olmo2", {}),
        ("Mixtral", {"sliding_window": None, "num_local_experts": 4}),
        ("Mistral", {"sliding_window": 128}),  # as long as the longest sequence: no window
        ("Phimoe", {"sliding_window": 128, "num_local_experts": 4}),
        ("Qwen2Moe", QWEN2_MOE | {"sliding_window": 64}),  # it does not use it
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_whose_attention_goes_through_the_interface_are_packed(family, overrides, dtype):
    policy = build(family, **overrides)
    policy.to(dtype)
    use_packed_attention(policy, SegmentPlan.of)
    assert policy.plan_rows is not None


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding_window = 16"),
        # These ask for their window in the mask alone.
        ("Phimoe", {"sliding_window": 64, "num_local_experts": 4}, "sliding_window = 64"),
        ("Doge", {"sliding_window": 64}, "sliding_window = 64"),
        ("Qwen2Moe", QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 64}, "sliding_window = 64"),
        ("Gemma2", {"head_dim": 16}, "softcap"),
        ("GptOss", {"head_dim": 16, "sliding_window": 128, "num_local_experts": 4}, "s_aux"),
        ("Mamba", {"state_size": 4}, "learner.packing = false"),
        ("Bloom", {"n_head": 2}, "learner.packing = false"),
    ],
)
def test_a_model_whose_sequences_cannot_be_kept_apart_is_refused(family, overrides, why):
    policy = build(family, **overrides)
    with pytest.raises(ConfigError, match=rf"{family}ForCausalLM cannot be packed") as refused:
        use_packed_attention(policy, SegmentPlan.of)
    assert why in str(refused.value)
    assert "learner.packing = false" in str(refused.value)
    assert policy.plan_rows is None


def test_attention_that_does_not_hear_of_segments_is_found_out(monkeypatch):
    real = packed_attention._attention
    monkeypatch.setattr(packed_attention, "_attention", lambda *args, packed_row=None, **kw: real(*args, **kw))
    with pytest.raises(ConfigError, match="what stands before a sequence in its row changes it"):
        use_packed_attention(build("Llama"), SegmentPlan.of)


def test_a_child_that_does_not_see_its_prompt_is_found_out(monkeypatch):
    real = SegmentPlan.of

    def orphans(segments: NDArray[np.int64], length: int, device: torch.device) -> SegmentPlan:
        without = segments.copy()
        without[:, 2] = NO_PARENT
        return real(without, length, device)

    monkeypatch.setattr(SegmentPlan, "of", orphans)
    with pytest.raises(ConfigError, match="off from the same by itself"):
        use_packed_attention(build("Llama"), real)


@pytest.mark.parametrize("asked", [{"indices": torch.zeros(1)}, {"is_causal": False}])
def test_attention_that_is_asked_for_what_it_does_not_know_is_an_error(asked):
    q = torch.zeros(1, 1, 3, 4)
    row = SegmentPlan.of(np.array([[0, 3, -1]]), 3)
    module = build("Llama").lm.model.layers[0].self_attn
    with pytest.raises(ConfigError, match=r"indices|later"):
        packed_attention._attention(module, q, q, q, None, packed_row=row, **asked)
    with pytest.raises(ConfigError, match="mask of the model's own"):
        packed_attention._attention(module, q, q, q, torch.zeros(1, 1, 3, 3), packed_row=row)


def test_no_mask_of_the_whole_row_is_made(monkeypatch, model_dir: Path):
    policy = PolicyModule(load_model(model_dir, torch.float32), 1.0)
    use_packed_attention(policy, SegmentPlan.of)
    for name, function in transformers.AttentionMaskInterface._global_mapping.items():

        def refuse(*_: Any, _name: str = name, **__: Any) -> None:
            raise AssertionError(f"{_name} made a mask")

        assert function is not None
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, refuse)
    ids = torch.arange(6)[None]
    segments = torch.tensor([[0, 2, -1], [2, 2, 0], [4, 2, 0]])
    logprobs, _ = policy(ids, torch.tensor([[0, 1, 2, 3, 2, 3]]), segments, torch.arange(5), ids[0, 1:])
    assert logprobs.shape == (5,)


def test_packed_rows_without_preparation_are_an_error(model_dir: Path):
    policy = PolicyModule(load_model(model_dir, torch.float32), 1.0)
    ids = torch.arange(4)[None]
    with pytest.raises(ConfigError, match="not made ready"):
        policy(ids, ids, torch.tensor([[0, 4, -1]]), torch.arange(3), ids[0, 1:])


def test_the_way_is_chosen_by_configuration(monkeypatch):
    assert choose_attention("auto", device="cpu", dtype=torch.float32) == SegmentPlan.of
    assert choose_attention("sdpa", device="cuda", dtype=torch.bfloat16) == SegmentPlan.of
    monkeypatch.setattr(packed_attention.importlib.util, "find_spec", lambda _: None)
    assert choose_attention("auto", device="cuda", dtype=torch.bfloat16) == SegmentPlan.of
    assert choose_attention("flex", device="cuda", dtype=torch.bfloat16) == packed_attention.FlexPlan.of
    with pytest.raises(ConfigError, match="flex needs a GPU"):
        choose_attention("flex", device="cpu", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"flash needs a GPU"):
        choose_attention("flash", device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"flash needs flash_attn"):
        choose_attention("flash", device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"flash needs learner.compute_dtype = bfloat16"):
        choose_attention("flash", device="cuda", dtype=torch.float32)
