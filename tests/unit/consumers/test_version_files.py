"""versions.jsonl as a reader sees it."""

from __future__ import annotations

from pathlib import Path

from anabranch.consumers.version_files import digests, read_versions
from anabranch.schemas.version_record import VERSIONS_FILE, VersionRecord
from anabranch.schemas.versions import PolicyVersion
from tests.unit.schemas.test_version_record import MADE

RECORDS = [VersionRecord.of(made) for made, *_ in MADE]


def test_each_manifest_is_there_once_whatever_a_crash_left(tmp_path: Path) -> None:
    assert read_versions(tmp_path) == []
    path = tmp_path / VERSIONS_FILE
    torn = RECORDS[2].line()[:-7]
    path.write_bytes(
        RECORDS[0].line() + RECORDS[1].line() + RECORDS[1].line() + torn + b"\n" + RECORDS[2].line() + torn
    )
    assert read_versions(tmp_path) == RECORDS[:3]


def test_the_digest_of_every_version(tmp_path: Path) -> None:
    (tmp_path / VERSIONS_FILE).write_bytes(b"".join(record.line() for record in RECORDS))
    assert digests(tmp_path) == {PolicyVersion(2, version): "a" * 32 for version in (4, 5, 8)}
