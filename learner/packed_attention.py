"""Packed rows through a Hugging Face model: its attention asks ours, and a check at the start that it does.

Invariant: a model passes `use_packed_attention` only if a sequence in a packed row comes out as it does by itself, other
sequences have no influence on it, and each of its tokens sees all before it, however long it is; no mask of a whole row is
made. Held by tests/unit/learner/test_packed_attention.py.

Transformers calls the function registered under the name in its configuration (`_attn_implementation`), hands it the keyword
arguments that the model was called with, and makes masks only for names it has a mask function for: there is none for ours.
Some models ask for a sliding window in the mask alone, which ours would then not hear of. So at the start, under another name
that has a mask function, it is seen what masks its layers get.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.kernels.segment_kernels import FlashPlan, FlexPlan
from anabranch.learner.model_costs import experts_of
from anabranch.schemas.errors import ConfigError

NAME, LOOK = "anabranch_segments", "anabranch_look_for_masks"
# What an attention function may be asked for besides, without a change of who sees whom, or how.
_HARMLESS = (
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
_LONG = 2**20  # tokens, of a model that does not say how many it takes


class RowPlan(Protocol):
    """Attention of one packed row, [1, heads, L, D] -> [1, heads, L, D]; see `SegmentPlan.attend`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor: ...


PlanRows = Callable[[NDArray[np.int64], int, torch.device], RowPlan]


def choose_attention(attention: str, *, device: str, dtype: torch.dtype) -> PlanRows:
    """What plans packed rows under `learner.attention`. `device`: cpu or cuda; `dtype`: of forward and backward.

    Raises:
        ConfigError: what was asked for cannot work here.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    flash = device == "cuda" and half and importlib.util.find_spec("flash_attn") is not None
    if attention == "flash" or (attention == "auto" and flash):
        if not flash:
            lacks = "a GPU" if device != "cuda" else "learner.compute_dtype = bfloat16" if not half else "flash_attn"
            raise ConfigError(f"learner.attention = flash needs {lacks}; use auto, which takes what there is")
        from flash_attn import flash_attn_varlen_func

        return lambda segments, length, where: FlashPlan.of(segments, length, where, flash_attn_varlen_func)
    if attention == "flex":
        if device != "cuda":
            raise ConfigError("learner.attention = flex needs a GPU: it has no backward pass on the CPU; use auto")
        return FlexPlan.of
    return SegmentPlan.of


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_row: RowPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. Without `packed_row` the rows are padded ones, and causal as they are."""
    if packed_row is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window, is_causal = kwargs.pop("sliding_window", None), kwargs.pop("is_causal", None)
    asked = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if window is not None and window < getattr(module.config, "max_position_embeddings", float("inf")):
        asked.append(f"sliding_window = {window}")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        asked.append("attention to what comes later")
    if attention_mask is not None:
        asked.append("mask of the model's own")
    if asked:
        raise ConfigError(f"packed rows know no {', '.join(asked)} in attention")
    return packed_row.attend(query, key, value, scale=scaling, dropout=dropout).transpose(1, 2).contiguous(), None


def _mask_to_look_at(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], config: Any, **_: Any
) -> Tensor | None:
    """What transformers calls for the mask of a kind of layer: none where every token sees all before it and nothing else.

    Args:
        mask_function: (row, head, query, key), all int64 [], -> whether the one sees the other, bool [].
    """
    first, last = torch.tensor(0), torch.tensor(getattr(config, "max_position_embeddings", _LONG) - 1)
    if mask_function(first, first, last, first) and not mask_function(first, first, first, last):
        return None
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def _look_for_mask(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as of padded rows, of a layer that has no mask."""
    if attention_mask is not None:
        window = getattr(module.config, "sliding_window", None) or getattr(module.config, "attention_chunk_size", None)
        raise ConfigError(f"packed rows know no window, chunks or other mask in attention (sliding_window = {window})")
    return _attention(module, query, key, value, None, **kwargs)


@dataclass(frozen=True)
class _Probe:
    """A prompt with two completions, and what else there is in the row."""

    before: Sequence[int]
    prompt: Sequence[int]
    first: Sequence[int]
    second: Sequence[int]

    def packed(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Token ids, positions and segments of the row."""
        p, a, b, start = len(self.prompt), len(self.first), len(self.second), len(self.before)
        ids = [*self.before, *self.prompt, *self.first, *self.second]
        positions = [*range(start), *range(p + a), *range(p, p + b)]
        return ids, positions, [[0, start, -1], [start, p, -1], [start + p, a, 1], [start + p + a, b, 1]]


def use_packed_attention(policy: Any, plan_rows: PlanRows) -> None:
    """Make `policy`, a `PolicyModule`, compute packed rows, and compare a small one with its sequences by themselves.

    Raises:
        ConfigError: this model's sequences cannot be kept apart, or not in this way.
    """
    name = type(policy.lm).__name__
    vocabulary = policy.lm.get_output_embeddings().weight.shape[0]
    ids = [(7 * i + 3) % vocabulary for i in range(40)]
    probe = _Probe(ids[:9], ids[9:17], ids[17:22], ids[22:29])
    other = _Probe([(i + 1) % vocabulary for i in ids[:9]], probe.prompt, probe.first, probe.second)
    advice = "set learner.packing = false, which trains padded rows"
    with torch.no_grad():
        alone = [_hidden(policy, [*probe.prompt, *rest]) for rest in (probe.first, probe.second)]
        _register(policy.lm, name, advice)
        try:
            _look_for_masks(policy)
            found, moved = (_packed_hidden(policy, p)[len(p.before) :] for p in (probe, other))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{name} cannot be packed: {error}; {advice}") from error
    wanted = torch.cat([alone[0], alone[1][len(probe.prompt) :]])
    exact = wanted.dtype in (torch.float32, torch.float64)
    # Where tokens are sent to experts, rounding can send one elsewhere; most of them must still come out the same.
    most = 0.5 if experts_of(policy.lm.config.get_text_config()) else 1.0
    if not (influence := _apart(moved, found, most)) <= (1e-4 if exact else 1e-2):
        raise ConfigError(
            f"{name} cannot be packed: what stands before a sequence in its row changes it by {influence:.2g}; {advice}"
        )
    if not (error_ := _apart(found, wanted, most)) <= (1e-3 if exact else 0.1):
        raise ConfigError(
            f"{name} cannot be packed: a sequence in a packed row comes out {error_:.2g} off from the same by itself; {advice}"
        )
    policy.plan_rows = plan_rows


def _apart(found: Tensor, wanted: Tensor, most: float) -> float:
    """Distance of states relative to their length, of the position at quantile `most`."""
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(most))


def _register(lm: Any, name: str, advice: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(LOOK, _look_for_mask)
    AttentionMaskInterface.register(LOOK, _mask_to_look_at)
    lm.set_attn_implementation(NAME)
    if lm.config.get_text_config()._attn_implementation != NAME:
        raise ConfigError(
            f"{name} cannot be packed: its attention does not go through transformers' interface; {advice}"
        )


def _look_for_masks(policy: Any) -> None:
    """Raises ConfigError: a mask is asked for that packed rows do not have."""
    policy.lm.set_attn_implementation(LOOK)
    try:
        _hidden(policy, [0, 0])
    finally:
        policy.lm.set_attn_implementation(NAME)


def _hidden(policy: Any, ids: list[int], **kwargs: Any) -> Tensor:
    device = policy.lm.get_input_embeddings().weight.device
    kwargs.setdefault("position_ids", torch.arange(len(ids), device=device)[None])
    out = policy.lm.base_model(input_ids=torch.tensor([ids], device=device), use_cache=False, **kwargs)
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def _packed_hidden(policy: Any, probe: _Probe) -> Tensor:
    ids, positions, segments = probe.packed()
    device = policy.lm.get_input_embeddings().weight.device
    # The way through the model is what is checked, and the model may not be on its GPU yet.
    row = SegmentPlan.of(np.array(segments, np.int64), len(ids), device)
    return _hidden(policy, ids, position_ids=torch.tensor([positions], device=device), packed_row=row)
