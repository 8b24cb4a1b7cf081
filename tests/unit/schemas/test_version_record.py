"""A line of versions.jsonl says what a manifest was."""

from __future__ import annotations

import json

import pytest

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Base, Chunk, Kind, Manifest
from anabranch.schemas.version_record import VersionRecord, parse_version
from anabranch.schemas.versions import PolicyVersion


def manifest(kind: Kind, version: int, base: Base | None = None, **changes: object) -> Manifest:
    chunks = () if kind == "fork" else (Chunk(digest="0" * 64, size_bytes=30), Chunk(digest="1" * 64, size_bytes=12))
    fields: dict[str, object] = {
        "kind": kind, "run": "run", "epoch": 2, "version": version, "base": base, "result_digest": "a" * 32,
        "layout_hash": "b" * 32, "codec": "c/1", "chunks": chunks, "full_bytes": 800, "changed_elements": 100,
        "total_elements": 400, "learner_step": version, "fork_version": 4, "published_ms": 77,
    }  # fmt: skip
    return Manifest.model_validate(fields | changes)


MADE = [
    (manifest("anchor", 4), "anchor", None, None),
    (manifest("delta", 5, Base(epoch=2, version=4, digest="d" * 32)), "delta", 4, 2),
    (manifest("skip", 8, Base(epoch=2, version=4, digest="d" * 32)), "skip4", 4, 2),
    (manifest("fork", 4, Base(epoch=1, version=4, digest="a" * 32), changed_elements=0), "fork", 4, 1),
]


@pytest.mark.parametrize(("made", "label", "base", "base_epoch"), MADE, ids=[label for _, label, _, _ in MADE])
def test_a_line_reads_back_as_the_record(made: Manifest, label: str, base: int | None, base_epoch: int | None) -> None:
    record = VersionRecord.of(made, commit_s=0.25)
    assert record.line().count(b"\n") == 1
    assert parse_version(record.line()) == record
    assert (record.label, record.base, record.base_epoch, record.kind) == (label, base, base_epoch, made.kind)
    assert (record.policy, record.name) == (PolicyVersion(2, made.version), (2, made.version, label))
    assert (record.payload_bytes, record.full_bytes) == (made.payload_bytes, 800)
    assert record.changed_fraction == (0 if label == "fork" else 0.25)
    assert (record.time_ms, record.result_digest, record.commit_s) == (77, "a" * 32, 0.25)


def test_what_is_made_beside_the_steps_has_no_time_of_its_own() -> None:
    record = VersionRecord.of(MADE[0][0])
    assert "commit_s" not in json.loads(record.line())
    assert parse_version(record.line()) == record


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", VersionRecord.of(MADE[0][0]).line()[:-9], b"\xff"])
def test_anything_else_is_refused_by_name(line: bytes) -> None:
    with pytest.raises(ManifestError, match="not the record of a version"):
        parse_version(line)


def test_a_field_of_a_later_version_is_passed_over() -> None:
    record = VersionRecord.of(MADE[1][0])
    assert parse_version(json.dumps(json.loads(record.line()) | {"mood": "good"})) == record
