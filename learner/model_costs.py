"""What a model's forward pass costs, from its shape: multiply-adds of a position, a query-key pair, a log-prob.

Invariant: only proportions matter, and they follow the weights that a token meets: of experts, those it is sent to. Held by
tests/unit/learner/test_model_costs.py.
"""

from __future__ import annotations

from typing import Any

from anabranch.kernels.row_plan import Costs

# The head computes its logits again in the backward pass: four products instead of three.
_HEAD = 4 / 3


def costs_of(lm: Any) -> Costs:
    """Args: lm, a Hugging Face causal language model with whole (not partitioned) weights."""
    config = lm.config.get_text_config()
    head = lm.get_output_embeddings().weight
    apart = {id(head), id(lm.get_input_embeddings().weight)}
    chosen, experts = getattr(config, "num_experts_per_tok", None), experts_of(config)
    met = chosen / experts if chosen and experts else 1.0
    per_token = sum(
        p.numel() * (met if ".experts." in name else 1.0)
        for name, p in lm.named_parameters()
        if p.ndim >= 2 and id(p) not in apart
    )
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Costs(float(per_token), 2.0 * config.num_hidden_layers * heads * width, _HEAD * head.numel())


def experts_of(config: Any) -> int | None:
    """Experts of each layer, if it has any."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if number := getattr(config, name, None):
            return int(number)
    return None
