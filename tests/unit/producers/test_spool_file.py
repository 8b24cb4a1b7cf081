"""Segments: every whole record is found, whatever was cut off or overwritten around it, and nothing else is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.producers.spool_file import (
    MISSING,
    RECORD_HEADER,
    SEGMENT_HEADER,
    Segment,
    read_payloads,
    record_header,
    scan,
    segment_header,
    segment_name,
)
from anabranch.schemas.errors import SchemaVersionError, SpoolError

PAYLOADS = [b"first", b"", b"a longer third one" * 3, b"ABgr" * 20, b"last"]
FIRST = 7
LENIENT = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole() -> bytes:
    records = [record_header(FIRST + i, 100 + i, p) + p for i, p in enumerate(PAYLOADS)]
    return segment_header(FIRST) + b"".join(records)


def ends() -> list[int]:
    """Where record i ends."""
    found, at = [], SEGMENT_HEADER
    for p in PAYLOADS:
        at += RECORD_HEADER + len(p)
        found.append(at)
    return found


def write(folder: Path, content: bytes) -> Path:
    path = folder / segment_name("east-00-abc123", FIRST)
    path.write_bytes(content)
    return path


def readable(segment: Segment) -> dict[int, tuple[int, bytes]]:
    rows = read_payloads(segment, segment.first_seq, segment.end_seq - segment.first_seq)
    return {seq: (group, found) for seq, group, found in rows if isinstance(found, bytes)}


EXPECTED = {FIRST + i: (100 + i, p) for i, p in enumerate(PAYLOADS)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    segment = scan(write(tmp_path, whole()))
    assert (segment.first_seq, segment.end_seq, segment.size, segment.damage) == (7, 12, len(whole()), [])
    assert readable(segment) == EXPECTED


def test_a_file_cut_off_at_any_byte_holds_the_records_before_the_cut(tmp_path: Path) -> None:
    for cut in range(SEGMENT_HEADER, len(whole())):
        segment = scan(write(tmp_path, whole()[:cut]))
        complete = [end for end in ends() if end <= cut]
        assert segment.end_seq == FIRST + len(complete), cut
        assert segment.size == (complete[-1] if complete else SEGMENT_HEADER), cut
        assert readable(segment) == dict(list(EXPECTED.items())[: len(complete)]), cut
        assert not segment.damage, cut


@given(st.integers(0, len(whole()) - 1), st.integers(1, 255))
@LENIENT
def test_one_wrong_byte_costs_one_record_at_most(tmp_path: Path, at: int, flip: int) -> None:
    content = bytearray(whole())
    content[at] ^= flip
    segment = scan(write(tmp_path, bytes(content)))
    hit = next((FIRST + i for i, end in enumerate(ends()) if at < end), None) if at >= SEGMENT_HEADER else None
    assert readable(segment) == {seq: row for seq, row in EXPECTED.items() if seq != hit}
    in_header = hit is None or at < ends()[hit - FIRST] - len(PAYLOADS[hit - FIRST])
    assert bool(segment.damage) == in_header, "a payload is verified when it is read"


@given(st.data())
@LENIENT
def test_overwritten_bytes_cost_the_records_they_lie_in(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole())
    start = data.draw(st.integers(SEGMENT_HEADER, len(content) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=len(content) - start))
    content[start : start + len(junk)] = junk
    begins = [SEGMENT_HEADER, *ends()]
    intact = {
        seq: row
        for i, (seq, row) in enumerate(EXPECTED.items())
        if bytes(content[begins[i] : begins[i + 1]]) == whole()[begins[i] : begins[i + 1]]
    }
    assert readable(scan(write(tmp_path, bytes(content)))) == intact


def test_a_hole_in_the_middle_is_told_by_number(tmp_path: Path) -> None:
    content = bytearray(whole())
    content[ends()[0] : ends()[2]] = b"\0" * (ends()[2] - ends()[0])
    segment = scan(write(tmp_path, bytes(content)))
    assert segment.damage == [
        f"{ends()[2] - ends()[0]} bytes at {ends()[0]} are no record",
        "records 8 to 9 are missing",
    ]
    assert list(segment.offsets)[1:3] == [MISSING, MISSING]
    errors = [str(e) for _, _, e in read_payloads(segment, 8, 2) if isinstance(e, SpoolError)]
    assert errors == [f"record {seq} of {segment.path} is missing" for seq in (8, 9)]


def test_records_far_behind_damage_are_found(tmp_path: Path) -> None:
    """Beyond one read of the search, and across the edge between two."""
    for gap in (2**20 - 20, 2**20, 2**20 + 17, 3 * 2**20):
        content = segment_header(FIRST) + b"\xff" * gap + record_header(9, 1, b"x") + b"x"
        assert readable(scan(write(tmp_path, content))) == {9: (1, b"x")}


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    head = struct.pack("<8sHHIQ", b"ABSPOOL\n", 2, 0, 0, FIRST)
    path = write(tmp_path, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)))
    with pytest.raises(SchemaVersionError, match=r"spool format 2; this program reads 1"):
        scan(path)


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.spool"
    path.write_bytes(whole())
    with pytest.raises(SpoolError, match=r"notes\.spool is not named like a segment"):
        scan(path)


def test_a_number_out_of_all_proportion_is_no_record(tmp_path: Path) -> None:
    content = segment_header(FIRST) + record_header(2**60, 1, b"x") + b"x" + record_header(FIRST, 1, b"y") + b"y"
    segment = scan(write(tmp_path, content))
    assert readable(segment) == {FIRST: (1, b"y")}


def test_the_format_does_not_change() -> None:
    """Spools outlive the program that wrote them."""
    assert segment_header(1).hex() == "414253504f4f4c0a0100000000000000010000000000000017ffe53d33f6e812"
    assert record_header(1, 2, b"abc").hex() == (
        "41426772030000000100000000000000020000000000000050392f89945faf78c1cff234b1e0a669"
    )
