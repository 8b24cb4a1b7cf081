"""A completion token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anabranch.consumers.viewer.trajectory import MOST_TOKENS, tokens_of, visible


def row(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": 3, "token_ids": [7, 8, 9], "logprobs": [-1.0, -1.0, -1.0], "learner_logprobs": [-1.0, -0.7, -2.5], "kept": [True, True, False],
        "entropy": [0.5, 0.25, 1.0], "factor": [1.0, None, 2.0], "advantage": -0.5,
        "version_spans": [{"epoch": 1, "version": 4, "start": 0}, {"epoch": 1, "version": 5, "start": 2}],
    } | changes  # fmt: skip


def test_tokens_have_their_values_and_classes():
    first, second, third = tokens_of(row(), lambda token: f"<{token}>")
    assert [t.text for t in (first, second, third)] == ["<7>", "<8>", "<9>"]
    assert first.classes.split() == ["v0", "an", "r0", "d0", "m1"]
    assert second.classes.split() == ["v0", "an", "r4", "d4", "m1"]
    assert third.classes.split() == ["v1", "an", "r6-", "d6", "m0"]
    assert "ratio 0.2231" in third.tells
    assert "sampled by e1.v5" in third.tells
    assert "masked" in third.tells
    assert "factor" not in second.tells


def test_what_no_record_tells_has_no_class():
    (first, *_) = tokens_of(row(learner_logprobs=None, kept=None, entropy=None, factor=None, advantage=None), None)
    assert first.classes == "v0 a0"
    assert first.text == "⟨7⟩", "without a tokenizer the id"
    assert first.tells.splitlines() == ["token 0: id 7 '⟨7⟩'", "sampled by e1.v4", "log-prob -1.0000"]


def test_pieces_that_are_no_text_are_shown():
    pieces = {7: "\x1b[2J", 8: "", 9: "a\nb\u202e"}
    assert [t.text for t in tokens_of(row(), pieces.__getitem__)] == ["\\x1b[2J", "⟨8⟩", "a\nb\\u202e"]


def test_long_ones_are_cut():
    count = MOST_TOKENS + 5
    long = row(
        tokens=count, token_ids=[1] * count, logprobs=[-1.0] * count, learner_logprobs=[-1.0] * count, kept=[True] * count,
        entropy=[0.0] * count, factor=[1.0] * count, version_spans=[{"epoch": 1, "version": 4, "start": 0}],
    )  # fmt: skip
    assert len(tokens_of(long, None)) == MOST_TOKENS


def test_numbers_gone_wrong_do_not_break_a_page():
    strange = row(learner_logprobs=[math.nan, math.inf, -math.inf])
    assert len(tokens_of(strange, None)) == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\r\x00\x7f", "\\r\\x00\\x7f"), ("\u2066x\u2069", "\\u2066x\\u2069"), ("é 漢", "é 漢")],
)
def test_only_what_is_printable_is_shown_as_it_is(text: str, shown: str):
    assert visible(text) == shown
