"""The facts of a step come back to the bit, and nothing else passes for them."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.step_record import (
    ROLLOUT_SCHEMA,
    TOKEN_COLUMNS,
    UpdateResult,
    parse_facts,
    parse_folder,
    step_folder,
)
from tests.step_records import facts, group_facts


def test_facts_read_back() -> None:
    made = facts(zero_variance=[9], weights_digest="cd", gpu="H", forks={1: 0, 4: 2})
    assert parse_facts(made.to_json()) == made
    assert made.rollouts == 4
    assert made.groups[0].identity == ("east", "east-0-ab", 8)


@given(st.floats(), st.floats())
def test_every_number_keeps_its_bits(loss: float, norm: float) -> None:
    """NaN and infinities too, which JSON has no numbers for."""
    made = facts(
        loss=loss, loss_bits=loss.hex(), grad_norm=norm, grad_norm_bits=norm.hex(),
        updates=[UpdateResult.of(loss, norm, applied=False)],
    )  # fmt: skip
    json.loads(made.to_json(), parse_constant=pytest.fail)
    back = parse_facts(made.to_json())
    for value, bits in ((loss, back.loss_bits), (norm, back.grad_norm_bits), (loss, back.updates[0].loss_bits)):
        assert float.fromhex(bits).hex() == value.hex()
    assert back.loss == loss or (math.isnan(back.loss) and math.isnan(loss))


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert parse_facts(json.dumps(json.loads(facts().to_json()) | {"mood": "good"})) == facts()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "JSON"), (facts().to_json()[:-30], "JSON"), (b"[]", "the whole"),
        (json.dumps(json.loads(facts().to_json()) | {"format": "anabranch.step/2"}).encode(), "format"),
        (json.dumps(json.loads(facts().to_json()) | {"step": 9}).encode(), "step 9 cannot lead from e1.v3"),
        (json.dumps(json.loads(facts().to_json()) | {"now": "e2.v3"}).encode(), "cannot lead from e2.v3"),
        (json.dumps(json.loads(facts().to_json()) | {"groups": []}).encode(), "groups"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: bytes, told: str) -> None:
    with pytest.raises(StepRecordError, match=told) as refused:
        parse_facts(text)
    assert "not the facts of a step" in str(refused.value)


@given(st.integers(0, 10**8), st.integers(1, 10**14))
def test_a_folder_says_which_step_it_is_of(epoch: int, step: int) -> None:
    folder = step_folder(epoch, step)
    assert folder.parts[0] == "steps"
    assert parse_folder(*folder.parts[1:]) == (epoch, step)


@pytest.mark.parametrize(
    "names",
    [("epoch=1", "0000001"), ("epoch=01", "000001"), ("epoch=1", "12"), ("epoch=1", ".000001.tmp"), ("1", "000001"),
     ("epoch=1", "000001\n")],
)  # fmt: skip
def test_other_names_are_of_no_step(names: tuple[str, str]) -> None:
    assert parse_folder(*names) is None


def test_what_only_a_forward_pass_gives_may_be_missing_and_nothing_else() -> None:
    missing = {field.name for field in ROLLOUT_SCHEMA if field.nullable}
    figures = {"advantage", "weight", "ratio_mean", "ratio_max", "kept_fraction", "loss_share"}
    assert missing == figures | set(TOKEN_COLUMNS)
    assert all(pa.types.is_list(ROLLOUT_SCHEMA.field(name).type) for name in TOKEN_COLUMNS)


def test_negative_numbers_name_no_delivery() -> None:
    with pytest.raises(ValueError, match="seq"):
        group_facts(3, seq=-1)
