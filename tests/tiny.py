"""Tiny random checkpoints for tests, made on the spot: a byte-level tokenizer and a Qwen3 or Llama of ~0.1M parameters.

The product's own tiny model is `learner/tiny_model.py`; this one only needs to exercise an engine: head size 32 (the
CPU attention kernel refuses 16), grouped-query attention, a vocabulary that vLLM pads, bf16 on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_ID, OTHER_EOS_ID = 258, 257


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0..255), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=2048
    )


def build_checkpoint(
    model_dir: Path,
    *,
    family: Literal["qwen3", "llama"] = "qwen3",
    tied: bool = True,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a checkpoint and its tokenizer to `model_dir` and return it. Weights are wide enough for uneven logits."""
    config_class, model_class = (
        (Qwen3Config, Qwen3ForCausalLM) if family == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    )
    config = config_class(
        vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=tied, initializer_range=0.15, bos_token_id=257, eos_token_id=EOS_ID, pad_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(model_dir, max_shard_size=max_shard_size)
    build_tokenizer().save_pretrained(model_dir)
    return model_dir
