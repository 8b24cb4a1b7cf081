"""The tiny model: bytes are tokens, the folder is reproducible, the warm start teaches and flattens, the cache is all or
nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path

import pytest
import torch

from anabranch.learner import model_cache
from anabranch.learner.muon import Muon, orthogonalise
from anabranch.learner.tiny_model import (
    EOS_ID,
    PAD_ID,
    TinyShape,
    build_model,
    build_tokenizer,
    make_tiny,
    save_checkpoint,
)
from anabranch.learner.warm_start import Example, WarmStart, flatten_policy, warm_start
from anabranch.schemas.errors import DeadlineError

SMALL = TinyShape(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
BRIEF = WarmStart(
    fall_below=0.2,
    fall_steps=10,
    max_steps=100,
    batch=32,
    warmup_steps=5,
    start_reward=0.6,
    measured_on=100,
    report_every=20,
)


def successor(index: int) -> tuple[str, str]:
    """A toy task with 26 problems: which letter comes next."""
    letter = index * 7 % 26
    return f"{chr(97 + letter)}=", chr(97 + (letter + 1) % 26)


def example(index: int) -> Example:
    prompt, answer = successor(index)
    return list(prompt.encode()), [*answer.encode(), EOS_ID]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def silent(line: str) -> None: ...


def test_the_token_of_a_byte_is_the_byte_and_any_text_survives() -> None:
    tokenizer = build_tokenizer()
    text = "12 + 34 =\n\tµ€🙂 \x00\x7f"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*b"46", EOS_ID, PAD_ID], skip_special_tokens=True) == "46"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (EOS_ID, PAD_ID, None)


def test_the_default_shape_has_about_a_million_parameters() -> None:
    assert sum(p.numel() for p in build_model(TinyShape(), 0).parameters()) == 1_050_496


def test_the_folder_is_a_checkpoint_that_transformers_loads_and_that_changes_nothing_about_sampling(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_model(SMALL, 0)
    save_checkpoint(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1 + 1 =") == list(b"1 + 1 =")
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(settings) <= {"eos_token_id", "pad_token_id", "transformers_version", "_from_model_config"}
    assert settings["eos_token_id"] == EOS_ID


def test_weights_follow_the_seed_and_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (build_model(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_warm_start_teaches_and_stops_at_the_reward_it_should_leave() -> None:
    model = build_model(SMALL, 0)
    lines: list[str] = []
    probability = warm_start(model, example, BRIEF, pad_id=PAD_ID, report=lines.append)
    assert probability == pytest.approx(BRIEF.start_reward, abs=1e-3)
    assert lines[0].startswith("warm start step 20, loss ")
    with torch.no_grad():  # what it knows is more than what it shows: the likeliest answer is right
        right = [
            model(input_ids=torch.tensor([example(i)[0]])).logits[0, -1].argmax().item() == example(i)[1][0]
            for i in range(26)
        ]
    assert sum(right) >= 24


def test_flattening_never_sharpens() -> None:
    model = build_model(SMALL, 0)
    head = model.lm_head.weight.clone()
    before, after = flatten_policy(model, [example(i) for i in range(26)], 0.5, pad_id=PAD_ID)
    assert torch.equal(model.lm_head.weight, head)
    assert before == after == pytest.approx((1 / 258) ** 2, rel=0.5)  # two tokens out of 258, at random


def test_the_same_recipe_gives_the_same_bits_and_is_made_once(tmp_path: Path) -> None:
    made = []

    def problems(index: int) -> tuple[str, str]:
        made.append(index)
        return successor(index)

    def make(parent: Path, determined_by: dict[str, str] | None = None) -> Path:
        return make_tiny(
            parent, lambda: problems, determined_by=determined_by or {}, shape=SMALL, warm=BRIEF, report=silent
        )

    first = make(tmp_path / "a")
    asked = len(made)
    assert made == list(range(asked))  # each problem once
    assert make(tmp_path / "a") == first
    assert len(made) == asked  # found, not made
    assert digests(make(tmp_path / "b")) == digests(first)
    assert make(tmp_path / "a", {"task": "another"}) != first


def test_a_build_that_fails_leaves_nothing_and_a_killed_one_is_cleared_away(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        model_cache.make(tmp_path, {"a": 1}, broken)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]

    (tmp_path / ".making-0123").mkdir()
    (tmp_path / ".making-0123" / "half.bin").write_bytes(b"half")
    folder = model_cache.make(tmp_path, {"a": 1}, lambda f: (f / "whole.bin").write_bytes(b"whole") and None)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([".lock", folder.name])
    assert sorted(p.name for p in folder.iterdir()) == ["anabranch_recipe.json", "whole.bin"]


def test_waiting_for_another_process_has_a_deadline_that_names_it(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as other:  # a lock belongs to the open file: this one is another's
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="the process that makes models under"):
            model_cache.make(tmp_path, {"a": 1}, lambda folder: None, deadline_s=0.3)
    assert model_cache.make(tmp_path, {"a": 1}, lambda folder: None, deadline_s=0.3).is_dir()


def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_evens_its_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(8, 4, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q
    tall = left @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0])) @ right
    for matrix in (tall, tall.mT):
        values = torch.linalg.svdvals(orthogonalise(matrix[None])[0])
        assert values.min() > 0.6
        assert values.max() < 1.3
    in_its_own_basis = left.mT @ orthogonalise(tall[None])[0] @ right.mT
    assert (in_its_own_basis - in_its_own_basis.diag().diag()).abs().max() < 1e-4


def test_muon_moves_a_matrix_by_its_rate_whatever_the_size_of_the_gradient() -> None:
    moved = []
    for size in (1e-3, 1e3):
        parameter = torch.nn.Parameter(torch.zeros(16, 16))
        parameter.grad = size * torch.eye(16)
        Muon([parameter], lr=0.1).step()
        moved.append(parameter.detach().clone())
    assert torch.allclose(moved[0], moved[1], rtol=1e-3)
    # lr · 0.2 · sqrt(16) · singular value (0.7 to 1.2)
    assert 0.1 * 0.8 * 0.65 < -moved[0][0, 0] < 0.1 * 0.8 * 1.25
