from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.deploy.plain_text import hexdump, plain, time_of_id


@given(st.one_of(st.text(), st.binary()), st.one_of(st.none(), st.integers(3, 50)))
def test_nothing_that_moves_a_cursor_comes_through(value, limit):
    shown = plain(value, limit)
    assert shown.isprintable()
    assert limit is None or len(shown) <= limit


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("3 + 4 = α", "3 + 4 = α"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc\x00", "a\\nb\\tc\\x00"),
        ("\u202eevil", "\\u202eevil"),  # writes from right to left
        ("\x9b31m", "\\x9b31m"),  # the one-byte form of ESC [
        ("\ud800", "\\ud800"),
        (b"caf\xc3\xa9 \xff\x07", "café \\xff\\x07"),
        ("see redis://u:s3cret@h:1/0", "see redis://u:***@h:1/0"),
    ],
)
def test_what_is_shown(value, shown):
    assert plain(value) == shown


def test_long_text_is_cut():
    assert plain("x" * 100, 10) == "xxxxxxx..."
    assert plain(b"\x00" * 100, 10) == "\\x00\\x0..."


def test_the_dump_of_bytes():
    assert hexdump(b"ARROW1\x00\x1b[31m rest of it", 18) == [
        "00000000  41 52 52 4f 57 31 00 1b 5b 33 31 6d 20 72 65 73  ARROW1..[31m res",
        "00000010  74 20                                            t ",
    ]
    assert hexdump(b"", 18) == []


@pytest.mark.parametrize(
    ("stream_id", "shown"),
    [("1767225600123-4", "2026-01-01 00:00:00"), ("x-1", "-"), ("", "-"), (f"{2**64 - 1}-0", "-")],
)
def test_when_the_server_made_an_id(stream_id, shown):
    assert time_of_id(stream_id) == shown
