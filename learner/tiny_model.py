"""The small model of the `tiny` preset: a Qwen3 of about a million parameters and a byte-level tokenizer.

Invariant: the folder is a function of (shape, seed) alone, bit for bit, and holds what any Hugging Face checkpoint
holds: config, bf16 safetensors, tokenizer, and a generation config that changes nothing about sampling. The token of a
byte is the byte's own value. Held by tests/unit/learner/test_tiny_model.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anabranch.learner import model_cache, muon, warm_start
from anabranch.learner.warm_start import Example, Report, WarmStart

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258


@dataclass(frozen=True, slots=True)
class TinyShape:
    """1,050,496 parameters. Head size 32 is the smallest that vLLM's CPU attention takes; the grouped-query attention
    and the untied head make it a layout that larger models have too."""

    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False


def make_tiny(
    parent: Path,
    problems: Callable[[], Callable[[int], tuple[str, str]]],
    *,
    determined_by: Mapping[str, Any],
    code: tuple[ModuleType, ...] = (),
    shape: TinyShape | None = None,
    warm: WarmStart | None = None,
    seed: int = 0,
    report: Report,
) -> Path:
    """The folder under `parent` with the warm-started tiny model; made only if it is not there yet.

    Args:
        problems: gives prompt text and right answer by index; called only when the model has to be made.
        determined_by, code: what else `problems` depends on: plain data, and the modules it comes from.
    """
    shape, warm = shape or TinyShape(), warm or WarmStart()
    own = sys.modules[__name__]
    recipe = {
        **determined_by, "shape": asdict(shape), "warm start": asdict(warm), "seed": seed,
        "code": model_cache.code_version(own, muon, warm_start, *code),
    }  # fmt: skip

    def build(folder: Path) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a sum split over threads rounds differently
        try:
            tokenizer, model, problem = build_tokenizer(), build_model(shape, seed), problems()

            def example(index: int) -> Example:
                prompt, answer = problem(index)
                return tokenizer.encode(prompt), [*tokenizer.encode(answer), EOS_ID]

            warm_start.warm_start(model, example, warm, pad_id=PAD_ID, report=report)
            save_checkpoint(model, folder)
        finally:
            torch.set_num_threads(threads)

    return model_cache.make(parent, recipe, build)


def build_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` with one token per byte and the two special tokens; it adds nothing by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level tokenizers write each byte as a printable character: bytes that are printable as themselves, the rest
    # in order from U+0100 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=512,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(shape: TinyShape, seed: int) -> Any:
    """A `Qwen3ForCausalLM` in float32 with weights drawn by `seed`; the caller's random state is left alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, pad_token_id=PAD_ID, eos_token_id=EOS_ID, bos_token_id=None, use_cache=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, **asdict(shape),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_checkpoint(model: Any, folder: Path) -> None:
    """Write `model`, rounded to bf16, and the tokenizer into `folder`."""
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # vLLM takes sampling defaults from this file: it must hold none.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
