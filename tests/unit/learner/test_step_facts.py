"""The facts of a step: what it computed, and what decided it."""

import math

import pytest

from anabranch.learner.machine_facts import machine_facts
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_facts import arithmetic_settings, digest_of, step_facts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.schemas.config import load_config
from anabranch.schemas.step_record import UpdateResult, parse_facts
from tests.record_orders import order_of
from tests.unit.learner.conftest import make_batch

CONFIG = load_config("", overrides=["run.name=r"])
ORDER = order_of(make_batch(range(3)), epoch=2, version=6)
UPDATES = [UpdateFacts((0, 1), (1,), 1.0), UpdateFacts((2,), (), 1.0)]


def made(*seen: SeenUpdate):
    return step_facts(CONFIG, ORDER, UPDATES, seen, machine_facts("cpu"), lr=1e-4, time_ms=5, step_s=0.5)


def update(loss: float, norm: float, *, applied: bool = True, alarms: tuple[str, ...] = ()) -> SeenUpdate:
    return SeenUpdate([], UpdateResult.of(loss, norm, applied=applied), alarms)


def test_they_tell_of_all_updates_and_of_the_first_by_itself():
    facts = made(update(0.25, 1.5), update(0.5, 2.5, applied=False, alarms=("ess_token = 0.1, below 0.3",)))
    assert (facts.epoch, facts.version_before, facts.step, facts.now) == (2, 6, 7, "e2.v6")
    assert (facts.loss, facts.grad_norm, facts.lr) == (0.25, 1.5, 1e-4)
    assert [u.loss for u in facts.updates] == [0.25, 0.5]
    assert facts.zero_variance == [1]
    assert facts.skipped == [2]
    assert facts.alarms == ["ess_token = 0.1, below 0.3"]
    assert facts.rollouts == 12


def test_updates_that_were_not_begun_count_as_skipped():
    assert made(update(math.nan, 0.0, applied=False)).skipped == [0, 1, 2]


def test_they_survive_json_with_every_bit_and_without_numbers_that_json_lacks():
    facts = made(update(math.nan, math.inf, applied=False))
    again = parse_facts(facts.to_json())
    assert math.isnan(again.loss)
    assert again.updates[0].grad_norm == math.inf
    third = made(update(1 / 3, 2 / 3))
    assert float.fromhex(parse_facts(third.to_json()).loss_bits) == 1 / 3


def test_the_digest_is_that_of_what_decides_the_arithmetic():
    same = load_config("", overrides=["run.name=other", "stream.block_ms=77"])
    assert (
        digest_of(arithmetic_settings(same))
        == digest_of(arithmetic_settings(CONFIG))
        == made(update(1.0, 1.0)).config_digest
    )


@pytest.mark.parametrize(
    "key",
    [
        "learner.lr=0.5", "correction.max_age=3", "gates.ess=0.01", "run.seed=99", "sampling.temperature=0.5",
        "sampling.max_tokens=33",
    ],
)  # fmt: skip
def test_another_value_of_what_decides_the_arithmetic_is_another_digest(key):
    other = load_config("", overrides=["run.name=r", key])
    assert digest_of(arithmetic_settings(other)) != digest_of(arithmetic_settings(CONFIG))


def test_the_machine_is_named():
    facts = machine_facts("cpu")
    assert facts.packages["torch"].startswith("2.")
    assert facts.cpu.count(",") >= 1
    assert machine_facts("cpu") == facts


def test_a_step_on_the_cpu_never_asks_for_a_gpu(monkeypatch):
    """Asking opens a context there: hundreds of MiB of a GPU that others work on; and no bit of the step is its doing."""

    def asked() -> str:
        raise AssertionError("the GPU was asked for its name")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", asked)
    asks = machine_facts.__wrapped__  # past its memory
    assert asks("cpu").gpu == ""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    assert asks("cuda").gpu == "a GPU"
