"""What a terminal is shown of text that a model wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import block, fit, json_value, number, table, versions, when, width_of


@given(st.text(max_size=80), st.integers(20, 80))
def test_a_block_is_printable_and_narrow(text: str, width: int) -> None:
    for line in block(text, width):
        assert line.isprintable()
        assert len(line) <= width


@given(st.text(max_size=40).map(plain), st.integers(1, 30))
def test_what_is_fitted_has_that_width(text: str, width: int) -> None:
    assert width_of(fit(text, width)) == width


def test_lines_of_a_block_are_those_of_the_text() -> None:
    assert block("a\n\n  b\x1b[31m", 40) == ["a", "", "  b\\x1b[31m"]
    assert block("a\nb\nc\nd", 40, most=2) == ["a", "b", "... 2 more lines"]


def test_wide_characters_count_twice() -> None:
    assert fit("日本語", 6) == "日本語"
    assert fit("日本語", 5) == "日本…"
    assert fit("日本語", 4) == "日… "


def test_columns_are_aligned() -> None:
    assert table(["id", "n"], [["a", "1"], ["日本", "20"]]) == ["id     n", "a      1", "日本  20"]
    assert table(["x"], []) == ["x"]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (1234, "1,234"), (0.5, "0.5"), (float("nan"), "nan"), (1e-9, "1e-09")]
)
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_times_are_utc_to_the_millisecond() -> None:
    assert when(1_767_225_600_123) == "2026-01-01 00:00:00.123"
    assert when(None) == "-"
    assert when(2**62) == str(2**62)


@pytest.mark.parametrize(
    ("row", "shown"),
    [((1, 1, 3, 3), "e1.v3"), ((1, 1, 3, 5), "e1.v3-5"), ((1, 2, 3, 5), "e1.v3-e2.v5"), ((None,) * 4, "-")],
)
def test_versions(row: tuple[int, ...], shown: str) -> None:
    assert versions(dict(zip(("epoch_min", "epoch", "version_min", "version_max"), row, strict=True))) == shown


def test_json_has_no_nan() -> None:
    assert json_value({"a": [float("nan"), 1.0, b"\x00\xff", None, "x"]}) == {"a": ["nan", 1.0, "00ff", None, "x"]}
