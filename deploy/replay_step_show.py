"""What `anabranch replay step` prints. Pure.

Invariant: what a difference says of a trajectory is its id, never its text; the last line is the verdict. Held by
tests/unit/deploy/test_replay_step_show.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from anabranch.consumers.step_comparison import Difference
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_step import StepReplay
from anabranch.deploy.replay_text import number, table

SHOWN = 12  # differences of a step


def render(replays: Sequence[StepReplay]) -> str:
    lines = list(
        table(
            ["epoch", "step", "from", "loss", "grad norm", "rollouts", "tokens", "weights", ""],
            [_row(one) for one in replays],
            left=(2, 7, 8),
        )
    )
    for text in dict.fromkeys(text for one in replays for text in one.surroundings):
        lines.append(f"not as it was, so bits may differ: {plain(text)}")
    for one in replays:
        if not one.equal:
            lines += ["", f"step {one.facts.step} of epoch {one.facts.epoch} differs, the cause first:", *_told(one)]
    equal = sum(one.equal for one in replays)
    verdict = "bit-equal" if equal == len(replays) else f"DIFFERENT: {len(replays) - equal} of {len(replays)} steps"
    lines += ["", f"{len(replays)} step{'s' if len(replays) != 1 else ''} run again: {verdict}"]
    return "\n".join(lines)


def as_json(one: StepReplay) -> dict[str, Any]:
    return {
        "epoch": one.facts.epoch,
        "step": one.facts.step,
        "equal": one.equal,
        "from_step": one.start.step,
        "from_checkpoint": None if one.start.folder is None else one.start.folder.name,
        "loss": one.facts.loss,
        "rollouts": one.facts.rollouts,
        "weights_digest": one.digest,
        "weights_digest_then": one.digest_then,
        "differences": [asdict(difference) for difference in one.differences],
        "tensors_apart": [{"name": name, "elements": count, "of": of} for name, count, of in one.apart],
        "not_as_it_was": one.surroundings,
    }


def _row(one: StepReplay) -> list[str]:
    facts, start = one.facts, one.start
    weights = "not recorded" if one.digest_then is None else ("equal" if one.digest == one.digest_then else "differ")
    return [
        str(facts.epoch), str(facts.step), "the model" if start.folder is None else start.folder.name, number(facts.loss),
        number(facts.grad_norm), str(facts.rollouts), "compared" if facts.tokens else "not recorded", weights,
        "equal" if one.equal else "DIFFERENT",
    ]  # fmt: skip


def _told(one: StepReplay) -> list[str]:
    lines = [f"  {_difference(difference)}" for difference in one.differences[:SHOWN]]
    if len(one.differences) > SHOWN:
        lines.append(f"  and {len(one.differences) - SHOWN} more quantities")
    lines += [f"  tensor {plain(name)}: {count:,} of {of:,} elements differ" for name, count, of in one.apart]
    return lines


def _difference(one: Difference) -> str:
    text = f"{one.what} at {plain(one.where)}: {plain(one.recorded)} then, {plain(one.replayed)} now"
    if one.count > 1:
        text += f"; in {one.count:,} places"
    if one.most is not None:
        text += f"; at most {number(one.most)} apart"
    if one.most_ulps is not None:
        text += f", {one.most_ulps:,} units in the last place"
    return text
