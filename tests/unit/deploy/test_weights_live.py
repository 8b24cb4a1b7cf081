from __future__ import annotations

import pytest

from anabranch.deploy.weights_live import ask_producers, render
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_boards import MemoryRunBoard
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import Made, digest_of, usual


class Fleet:
    """Producers that answer when the one who asks waits. Time passes only then."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.board = MemoryRunBoard(clock_ms=lambda: self.now_s * 1000)
        self.answers: dict[str, dict | None] = {}

    def report(self, name: str, *, policy: str = "e2.v8", **more) -> None:
        status = ProducerStatus(updated_ms=0, region="eu", pid=1, state="", policy=policy, **more)
        self.board.report_producer(name, status)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        token = self.board.verification_wanted()
        for name, answer in self.answers.items():
            if answer is not None:
                self.report(name, **({"verified_token": token} | answer))

    def ask(self, made: Made, *, deadline_s: float = 60):
        for name in self.answers:
            self.report(name, verified_token="an earlier one", verified_policy="e1.v1", verified_digest="0" * 32)
        return ask_producers(
            made.channel, self.board, deadline_s=deadline_s, clock=lambda: self.now_s, sleep=self.sleep
        )


@pytest.fixture
def made() -> Made:
    return usual(MemoryWeightChannel(MemoryWeightStore("r")), "r")


def served(made: Made, policy: PolicyVersion, of: PolicyVersion | None = None) -> dict[str, str]:
    return {"verified_policy": str(policy), "verified_digest": digest_of(made.states[of or policy])}


def test_right_and_wrong_engines_are_told_apart(made):
    fleet = Fleet()
    fleet.answers = {
        "a": served(made, PolicyVersion(2, 8)),
        "b": served(made, PolicyVersion(1, 3)),
        "c": served(made, PolicyVersion(2, 8), of=PolicyVersion(2, 7)),
        "d": {"verify_error": "the engine is in the middle of a swap"},
        "e": {"verified_policy": "e1.v99", "verified_digest": "0" * 32},
        "f": {"verified_token": "", "policy": ""},
    }
    answers, late = fleet.ask(made)
    assert late == []
    assert [(a.producer, bool(a.fault), a.unknown) for a in answers] == [
        ("a", False, False), ("b", False, False), ("c", True, False), ("d", True, False), ("e", False, True),
        ("f", False, True),
    ]  # fmt: skip
    text = render(answers, late)
    assert "WRONG: its engine's weights have digest" in text
    assert "WRONG: the engine is in the middle of a swap" in text
    assert "not compared: that version has left the channel" in text
    assert "serves none of the channel's versions yet" in text
    assert text.count(" right") == 2


def test_who_does_not_answer_is_late_and_who_vanishes_is_a_fault(made):
    fleet = Fleet()
    fleet.answers = {"quick": served(made, PolicyVersion(2, 8)), "gone": None, "slow": {"verified_token": ""}}
    answers, late = fleet.ask(made, deadline_s=35)
    assert late == ["slow"]
    assert [(a.producer, a.fault) for a in answers] == [
        ("gone", "it stopped reporting before it answered"), ("quick", ""),
    ]  # fmt: skip
    assert fleet.now_s == pytest.approx(35)
    assert "slow" in render(answers, late)
    assert "no answer yet" in render(answers, late)


def test_a_version_published_in_the_meantime_is_known(made):
    fleet = Fleet()
    fleet.answers = {"a": None}
    real = fleet.sleep

    def sleep(seconds: float) -> None:
        fleet.answers["a"] = served(made, made.step())
        real(seconds)

    fleet.sleep = sleep
    (answer,), _ = fleet.ask(made)
    assert (answer.policy, answer.fault, answer.unknown) == ("e2.v9", "", False)


def test_nobody_to_ask(made):
    with pytest.raises(TemporaryError, match="no producer reports"):
        Fleet().ask(made)
