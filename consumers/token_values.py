"""What is known of each token of a recorded completion. Pure, but for reading a tokenizer.

Invariant: every list has one value per token, in their order. Held by tests/unit/deploy/test_replay_show.py and
tests/unit/consumers/test_viewer_trajectory.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Piece = Callable[[int], str]


def token_pieces(model: Path | None) -> Piece | None:
    """What the run's tokenizer makes of a token id, None if it is not at hand."""
    if model is None or not (model / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises plain Exception; ids can be shown without it
        return None
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def token_ratios(row: dict[str, Any]) -> list[float] | None:
    """e^(learner's log-prob − recorded), per token; None if the learner's were not recorded."""
    if row["learner_logprobs"] is None:
        return None
    return [
        math.exp(min(20.0, max(-20.0, ours - theirs)))
        for ours, theirs in zip(row["learner_logprobs"], row["logprobs"], strict=True)
    ]


def token_policies(row: dict[str, Any]) -> list[str]:
    found: list[str] = []
    spans = row["version_spans"]
    for span, following in itertools.zip_longest(spans, spans[1:]):
        end = row["tokens"] if following is None else following["start"]
        found += [f"e{span['epoch']}.v{span['version']}"] * (end - span["start"])
    return found
