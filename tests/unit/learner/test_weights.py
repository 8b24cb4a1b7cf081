from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anabranch.learner.policy import load_model
from anabranch.learner.weights import PublishedWeights, export_hf
from anabranch.schemas.errors import TemporaryError
from tests.limits import file_size_limit


@pytest.mark.parametrize("which", ["model_dir", "untied_model_dir", "moe_dir"])
def test_names_shapes_and_bits_are_those_of_the_checkpoint(which, request):
    directory = request.getfixturevalue(which)
    stored = load_file(directory / "model.safetensors")
    published = PublishedWeights(load_model(directory, torch.bfloat16))
    bits = published.bits()
    assert {t.name: (t.dtype, t.shape) for t in published.layout.tensors} == {
        name: ("bf16", tuple(tensor.shape)) for name, tensor in stored.items()
    }
    assert bits.keys() == stored.keys()
    for name, tensor in stored.items():
        assert bits[name].dtype == np.uint16
        assert np.array_equal(bits[name], tensor.view(torch.int16).numpy().reshape(-1).view(np.uint16)), name


def test_masters_are_published_rounded(model_dir: Path):
    lm = load_model(model_dir, torch.bfloat16)
    published = PublishedWeights(lm)
    lm.float()
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.001)
    for name, tensor in published.tensors().items():
        assert torch.equal(tensor, lm.state_dict()[name].to(torch.bfloat16))


def test_what_was_published_does_not_change_with_the_weights(model_dir: Path):
    lm = load_model(model_dir, torch.float32)
    bits = PublishedWeights(lm).bits()
    before = {name: b.copy() for name, b in bits.items()}
    with torch.no_grad():
        for p in lm.parameters():
            p.zero_()
    assert all(np.array_equal(bits[name], before[name]) for name in bits)


@pytest.mark.parametrize("which", ["model_dir", "untied_model_dir", "moe_dir"])
def test_an_exported_folder_loads_and_says_the_same(which, request, tmp_path: Path):
    directory = request.getfixturevalue(which)
    lm = load_model(directory, torch.float32)
    published = PublishedWeights(lm)
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.01)
    export_hf(tmp_path / "out", published.layout, published.bits(), source=directory)
    ids = torch.tensor([[1, 2, 3, 4]])
    again = load_model(tmp_path / "out", torch.float32)
    assert again.config.dtype == torch.float32
    assert torch.equal(again(input_ids=ids).logits, lm(input_ids=ids).logits)


def test_a_full_disk_is_named_not_taken_for_a_bug(model_dir: Path, tmp_path: Path):
    published = PublishedWeights(load_model(model_dir, torch.float32))
    with pytest.raises(TemporaryError, match=r"model\.safetensors cannot be written"), file_size_limit(20_000):
        export_hf(tmp_path / "out", published.layout, published.bits(), source=model_dir)
