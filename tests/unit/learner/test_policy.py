from pathlib import Path

import pytest
import torch

from anabranch.learner.policy import MasterWeights, PolicyModule, check_head, load_model, states_at
from anabranch.schemas.errors import ConfigError, ModelMismatchError
from tests.unit.learner.conftest import VOCAB

IDS = [[5, 9, 2, 7, 1, 30], [8, 3, 4]]


def ask(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of every token but the first of both rows, padded into one batch."""
    ids = torch.tensor([IDS[0], IDS[1] + [63, 62, 61]])  # the padding is not zeros: it must not matter
    rows = torch.tensor([0] * 5 + [1] * 2)
    columns = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    positions = torch.arange(6).expand(2, 6)
    return module(ids, positions, torch.empty((0, 3), dtype=torch.int64), rows * 6 + columns, ids[rows, columns + 1])


def direct(lm, temperature: float) -> torch.Tensor:
    """The same from the model's own logits, each row by itself."""
    parts = []
    for row in IDS:
        ids = torch.tensor([row])
        log_p = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature, dim=-1)
        parts.append(log_p.gather(1, ids[0, 1:, None]).squeeze(1))
    return torch.cat(parts)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("which", ["model_dir", "untied_model_dir"])
def test_padded_rows_give_what_the_model_says_of_each_row_alone(which, temperature, request):
    lm = load_model(request.getfixturevalue(which), torch.float32)
    got, _ = ask(PolicyModule(lm, temperature))
    torch.testing.assert_close(got, direct(lm, temperature), atol=1e-5, rtol=0)


def test_gradients_are_those_of_the_models_own_logits(model_dir: Path):
    lm, twin = (load_model(model_dir, torch.float32) for _ in range(2))
    ask(PolicyModule(lm, 0.8))[0].sum().backward()
    direct(twin, 0.8).sum().backward()
    for (name, ours), (_, theirs) in zip(lm.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_masters_compute_with_the_rounded_weights_and_receive_the_gradient(model_dir: Path):
    served = PolicyModule(load_model(model_dir, torch.float32), 1.0)
    masters = MasterWeights(PolicyModule(load_model(model_dir, torch.float32), 1.0), torch.bfloat16, torch.float32)
    with torch.no_grad():
        for mine, theirs in zip(masters.parameters(), served.parameters(), strict=True):
            mine.mul_(1 + 1e-3 * torch.randn_like(mine))  # off the bf16 grid
            theirs.copy_(mine.to(torch.bfloat16))
    before = [p.detach().clone() for p in masters.parameters()]
    (ours, _), (theirs, _) = ask(masters), ask(served)
    assert torch.equal(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, other, old in zip(masters.parameters(), served.parameters(), before, strict=True):
        assert torch.equal(mine, old)
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad, other.grad)


def test_bf16_compute_accumulates_gradients_in_float32(model_dir: Path):
    masters = MasterWeights(PolicyModule(load_model(model_dir, torch.bfloat16), 1.0), torch.bfloat16, torch.bfloat16)
    ask(masters)[0].sum().backward()
    once = [p.grad.clone() for p in masters.parameters()]
    for _ in range(256):
        ask(masters)[0].sum().backward()
    for p, g in zip(masters.parameters(), once, strict=True):
        assert torch.equal(p.grad, 257 * g)  # bf16 would have stopped counting at 256


def test_a_head_that_does_more_than_a_linear_map_is_refused(tmp_path: Path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, logits_scaling=4.0, initializer_range=0.5,
    )  # fmt: skip
    with pytest.raises(ModelMismatchError, match=r"GraniteForCausalLM.*more than a linear map"):
        check_head(PolicyModule(GraniteForCausalLM(config).eval(), 1.0))


@pytest.mark.parametrize(("family", "overrides"), [("Gemma2", {"head_dim": 16}), ("Cohere", {"logit_scale": 0.99})])
def test_a_cap_or_scale_is_found_where_logits_are_small_too(family: str, overrides: dict[str, object]):
    policy = PolicyModule(build(family, **overrides), 1.0)
    with pytest.raises(ModelMismatchError, match=rf"{family}ForCausalLM.*more than a linear map"):
        check_head(policy)


def build(family: str, **overrides: object):
    import transformers

    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**(shape | overrides))
        return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()


def test_a_model_that_does_not_name_its_body_is_refused():
    with pytest.raises(ConfigError, match="Llama4ForCausalLM does not name its part below the head"):
        PolicyModule(build("Llama4Text", head_dim=16, num_local_experts=2, intermediate_size_mlp=64), 1.0)


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("Phi3", ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}, 16),
        ("Llama", ROPE | {"rope_type": "dynamic", "factor": 2.0}, 32),
        ("Llama", ROPE | {"rope_type": "yarn", "factor": 2.0}, None),
    ],
)
def test_positions_that_the_longest_sequence_of_a_microbatch_would_change_are_refused(family, rope, longest):
    policy = PolicyModule(build(family, rope_parameters=rope, original_max_position_embeddings=16), 1.0)

    def of_a_row(length: int) -> None:
        ids, none = torch.arange(length)[None] % VOCAB, torch.empty((0, 3), dtype=torch.int64)
        policy(ids, torch.arange(length)[None], none, torch.arange(3), ids[0, 1:4])

    of_a_row(longest or 40)
    if longest:
        with pytest.raises(ModelMismatchError, match=rf"beyond {longest} {family}ForCausalLM encodes positions by"):
            of_a_row(longest + 1)


def test_the_gradient_at_the_end_of_a_shared_prompt_is_added_in_one_order_by_several_threads():
    g = torch.Generator().manual_seed(0)
    ends = torch.cat([torch.cat([torch.tensor([99]), torch.arange(100 + 60 * i, 159 + 60 * i)]) for i in range(16)])
    upstream = torch.randn(len(ends), 64, generator=g)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = set()
        for _ in range(30):
            states = torch.zeros(2000, 64).requires_grad_()
            states_at(states, ends).backward(upstream)
            seen.add(states.grad[99].numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def test_an_ordinary_head_passes(model_dir: Path):
    check_head(PolicyModule(load_model(model_dir, torch.bfloat16), 0.7))


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, torch.float32)
