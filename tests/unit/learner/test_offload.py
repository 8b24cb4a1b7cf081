"""Optimizer state (and parameters) in host memory by `learner.deepspeed`: the same training, publishing, gates and resume.

On one rank; two ranks: tests/e2e/test_rank_splits.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.learner.deepspeed_config import deepspeed_json
from anabranch.schemas.config import LearnerSection
from anabranch.schemas.errors import ConfigError
from tests.unit.learner.conftest import OPEN, make_batch
from tests.unit.learner.test_engine import same, values
from tests.unit.learner.test_update import SKIP, _open

STATES: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
ALL: dict[str, Any] = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
WAYS = pytest.mark.parametrize(
    ("stage", "offload"), [(1, STATES), (2, STATES), (3, STATES), (3, ALL)], ids=["1", "2", "3", "3, parameters too"]
)
BATCHES = [make_batch([0, 1]), make_batch([2, 3]), make_batch([4, 5])]


@WAYS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_offloaded_trains_to_rounding_as_what_is_not(engine, stage: int, offload: dict[str, Any], dtype: str):
    """A large eps keeps Adam from turning the rounding of a gradient near 0 into a whole step."""
    how = {"zero_stage": stage, "dtype": dtype, "compute_dtype": dtype, "eps": 1e-3}
    plain, made = engine(**how), engine(**how, deepspeed=offload)
    start = made.state_bits()
    for batch in BATCHES:
        expected, got = plain.train_step(batch), made.train_step(batch)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert not same(made.state_bits(), start)
    if dtype == "float32":
        np.testing.assert_allclose(values(made.state_bits()), values(plain.state_bits()), rtol=0, atol=1e-6)
    else:
        assert (values(made.state_bits()) != values(plain.state_bits())).mean() < 1e-3


@WAYS
def test_what_is_published_of_offloaded_weights_is_what_a_checkpoint_would_hold(engine, stage, offload):
    made = engine(zero_stage=stage, deepspeed=offload)
    image = made.share.image()
    for batch in BATCHES[:2]:
        made.train_step(batch)
        made.share.copy_to(image)
        bits = made.state_bits()
        for piece in made.share.pieces:
            name = made.layout.tensors[piece.tensor].name
            assert np.array_equal(image.bits(piece), bits[name][piece.start : piece.stop])


@WAYS
@pytest.mark.parametrize("first", [True, False], ids=["in the first step", "later"])
def test_a_gate_keeps_a_step_from_offloaded_state_too(engine, stage, offload, first: bool):
    how = {"zero_stage": stage, "deepspeed": offload}
    skipping, plain = engine(gates=SKIP, **how), engine(gates=OPEN, **how)
    if not first:
        with _open(skipping):
            skipping.train_step(BATCHES[0])
        plain.train_step(BATCHES[0])
    before = skipping.state_bits()
    assert skipping.train_step(BATCHES[1]).skipped_groups == (2, 3)
    assert same(skipping.state_bits(), before)
    with _open(skipping):
        after = skipping.train_step(BATCHES[2])
    expected = plain.train_step(BATCHES[2])
    assert (after.loss, after.grad_norm) == (expected.loss, expected.grad_norm)
    assert same(skipping.state_bits(), plain.state_bits())


@WAYS
def test_a_run_with_offloaded_state_resumes_bit_for_bit(engine, stage, offload, tmp_path: Path):
    how = {"zero_stage": stage, "deepspeed": offload}
    straight, resumed = engine(**how), engine(**how)
    straight.train_step(BATCHES[0])
    straight.save(tmp_path / "checkpoint", {"epoch": 1})
    assert resumed.load(tmp_path / "checkpoint") == {"epoch": 1}
    for batch in BATCHES[1:]:
        assert resumed.train_step(batch).loss == straight.train_step(batch).loss
    assert same(resumed.state_bits(), straight.state_bits())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_of_deepspeeds_own_reach_it(engine, stage: int):
    made = engine(
        zero_stage=stage,
        deepspeed={"zero_optimization": {"reduce_bucket_size": 12_345}, "communication_data_type": "bf16"},
    )
    assert made._engine.zero_reduce_bucket_size() == 12_345
    assert str(made._engine.communication_data_type) == "torch.bfloat16"
    assert deepspeed_json(LearnerSection())["communication_data_type"] == "fp32", "the default"


def test_a_setting_that_deepspeed_does_not_know_is_a_configuration_error(engine):
    with pytest.raises(ConfigError, match=r"learner\.deepspeed.*reduce_bucket_sise"):
        engine(deepspeed={"zero_optimization": {"reduce_bucket_sise": 1}})
