"""A line of the fate log says what a group was like, and nothing else passes for one."""

from __future__ import annotations

import json

import pytest

from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.fates import LOGGED, parse_fate
from tests.fates import record


@pytest.mark.parametrize("fate", LOGGED)
def test_a_line_reads_back_as_the_record(fate: str) -> None:
    made = record(fate=fate, producer='odd "name"\n')
    assert made.line().count(b"\n") == 1
    assert parse_fate(made.line()) == made
    assert made.identity == ("east", 'odd "name"\n', 4)


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert parse_fate(json.dumps(json.loads(record().line()) | {"mood": "good"})) == record()


def test_a_line_of_before_there_were_times_of_delivery_and_admission_is_read() -> None:
    old = {k: v for k, v in json.loads(record().line()).items() if k not in ("delivered_ms", "admitted_ms")}
    assert parse_fate(json.dumps(old)) == record(delivered_ms=None, admitted_ms=None)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[]", b"\xff\xfe", record().line()[:-20],
        json.dumps(json.loads(record().line()) | {"seq": -1}).encode(),
        json.dumps(json.loads(record().line()) | {"seq": "4"}).encode(),
        json.dumps(json.loads(record().line()) | {"fate": "eaten"}).encode(),
        record().line().replace(b"0.25", b"NaN"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(line: bytes) -> None:
    with pytest.raises(TrajectoryError, match="is not the fate of a group"):
        parse_fate(line)
