"""The page of one trajectory: its text token by token, its group, its life. From a reader's rows to what a template shows.

Invariant: the pieces of a completion stand in the order of its tokens, each beside the values that were recorded for it; whatever a model wrote is text,
with what is not printable escaped. Held by tests/unit/consumers/test_viewer_trajectory.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.consumers.token_values import Piece, token_policies, token_ratios

MOST_TOKENS = 8192  # shown at once
# Bounds of |log ratio|: a token of class k is above k of them.
DISTANCES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
BY = ("ratio", "difference", "version", "mask", "advantage")


@dataclass(frozen=True, slots=True)
class Token:
    """`classes`: one for each way of colouring; `tells`: all its numbers."""

    text: str
    classes: str
    tells: str


def visible(text: str) -> str:
    """`text` with its line breaks and tabs, all else that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def tokens_of(row: dict[str, Any], pieces: Piece | None) -> list[Token]:
    """At most `MOST_TOKENS`, from the first on."""
    policies = token_policies(row)
    order = {policy: number for number, policy in enumerate(dict.fromkeys(policies))}
    ratios = token_ratios(row)
    found = []
    for at in range(min(row["tokens"], MOST_TOKENS)):
        token = row["token_ids"][at]
        piece = f"⟨{token}⟩" if pieces is None else visible(pieces(token)) or f"⟨{token}⟩"
        ratio = ratios[at] if ratios else None
        kept = _at(row["kept"], at)
        classes = [f"v{order[policies[at]] % 6}", f"a{_sign(row['advantage'])}"]
        if ratio is not None:
            classes += [f"r{_level(math.log(ratio))}{'-' if ratio < 1 else ''}", f"d{_level(math.log(ratio))}"]
        if kept is not None:
            classes.append("m1" if kept else "m0")
        found.append(Token(piece, " ".join(classes), _tells(row, at, token, piece, policies[at], ratio, kept)))
    return found


def _tells(
    row: dict[str, Any], at: int, token: int, piece: str, policy: str, ratio: float | None, kept: bool | None
) -> str:
    lines = [f"token {at}: id {token} {piece!r}", f"sampled by {policy}", f"log-prob {row['logprobs'][at]:.4f}"]
    if ratio is not None:
        lines += [f"learner's {row['learner_logprobs'][at]:.4f}", f"ratio {ratio:.4g}"]
    for name in ("entropy", "factor"):
        value = _at(row[name], at)
        if value is not None:
            lines.append(f"{name} {value:.4g}")
    if kept is not None:
        lines.append("in the objective" if kept else "masked")
    if row["advantage"] is not None:
        lines.append(f"advantage {row['advantage']:+.4g}")
    return "\n".join(lines)


def _level(log_ratio: float) -> int:
    return sum(abs(log_ratio) > bound for bound in DISTANCES)


def _sign(advantage: float | None) -> str:
    return "0" if not advantage else ("p" if advantage > 0 else "n")


def _at(values: Sequence[Any] | None, at: int) -> Any:
    return None if values is None else values[at]
