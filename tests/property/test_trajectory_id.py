"""Ids of trajectories: printed and parsed back, in Python and in DuckDB alike."""

from __future__ import annotations

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory_id import TrajectoryId, decode_part, encode_part, parse_id

NAMES = st.text(min_size=1, max_size=40)
IDS = st.builds(TrajectoryId, NAMES, NAMES, st.integers(0, 10**15 - 1), st.one_of(st.none(), st.integers(0, 2**31 - 1)))


@given(IDS)
def test_an_id_is_parsed_back(one: TrajectoryId) -> None:
    text = str(one)
    assert parse_id(text) == one
    assert text.count("/") == (2 if one.sample is None else 3)
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text


@given(st.text(max_size=60))
def test_what_is_parsed_is_printed_as_it_was(text: str) -> None:
    try:
        one = parse_id(text)
    except UsageError:
        return
    assert str(one) == text


@given(st.text(alphabet="az%25F_./~ é", min_size=1, max_size=12))
def test_a_part_has_one_spelling(text: str) -> None:
    try:
        decoded = decode_part(text)
    except UsageError:
        return
    assert encode_part(decoded) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_duckdb_spells_it_the_same_way(text: str) -> None:
    with duckdb.connect() as connection:
        assert connection.execute("SELECT url_encode(?)", [text]).fetchone() == (encode_part(text),)


def test_an_id_reads_as_the_design_says() -> None:
    assert str(TrajectoryId("east", "east-0.1a2b", 17, 3)) == "east/east-0.1a2b/17/3"
    assert str(TrajectoryId("east", "east-0.1a2b", 17, 3).group) == "east/east-0.1a2b/17"
    assert str(TrajectoryId("a b", "x/y%", 0, 0)) == "a%20b/x%2Fy%25/0/0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "east",
        "east/p",
        "east/p/x",
        "east/p/01/0",
        "east/p/1/2/3",
        "east/p/-1",
        "east//1",
        "east/p/1/",
        "e t/p/1",
        "east/p/١",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_id(text)
