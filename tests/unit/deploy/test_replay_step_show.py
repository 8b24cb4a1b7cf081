"""What `anabranch replay step` prints."""

from __future__ import annotations

from pathlib import Path

from anabranch.consumers.step_comparison import Difference
from anabranch.deploy.replay_step import StepReplay
from anabranch.deploy.replay_step_show import SHOWN, as_json, render
from anabranch.learner.replay_plan import Start
from tests.step_records import facts

START = Start(3, 1, Path("checkpoints/step-00000003"))
EQUAL = StepReplay(facts(), START, digest="ab", digest_then="ab")


def test_equal_steps_end_in_the_verdict():
    text = render([EQUAL, StepReplay(facts(), Start(0, 1, None))])
    assert text.splitlines()[-1] == "2 steps run again: bit-equal"
    assert "step-00000003" in text
    assert "the model" in text
    assert "not recorded" in text, "of weights whose digest nobody wrote down"


def test_differences_are_listed_cause_first_and_counted():
    many = [Difference(f"quantity {k}", "here", "1", "2", 3, 0.25, 7) for k in range(SHOWN + 2)]
    text = render([EQUAL, StepReplay(facts(), START, many, ["torch 2 then, 3 now"], apart=[("a.weight", 3, 1000)])])
    assert text.index("quantity 0 at here: 1 then, 2 now; in 3 places; at most 0.25 apart, 7 units") < text.index(
        "quantity 1"
    )
    assert f"quantity {SHOWN}" not in text
    assert "and 2 more quantities" in text
    assert "tensor a.weight: 3 of 1,000 elements differ" in text
    assert "not as it was, so bits may differ: torch 2 then, 3 now" in text
    assert text.splitlines()[-1] == "2 steps run again: DIFFERENT: 1 of 2 steps"


def test_what_somebody_wrote_reaches_no_terminal_as_it_is():
    text = render([StepReplay(facts(), START, [Difference("record", "\x1b[2J", "\x07", "\u202e")])])
    assert not set("\x1b\x07\u202e") & set(text)


def test_json_tells_all_of_it():
    told = as_json(StepReplay(facts(), START, [Difference("lr", "the step", "1", "2")], digest="a", digest_then="b"))
    assert (told["step"], told["equal"], told["from_checkpoint"]) == (4, False, "step-00000003")
    assert told["differences"][0]["what"] == "lr"
