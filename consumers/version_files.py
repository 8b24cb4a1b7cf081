"""The versions that a learner committed, as its run directory tells them.

Invariant: each manifest is there once, in the order in which they were committed, whatever a crash left of the file; reading
takes a file that is being written. Held by tests/unit/consumers/test_version_files.py.
"""

from __future__ import annotations

from pathlib import Path

from anabranch.consumers.fate_files import whole_lines
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.version_record import VERSIONS_FILE, VersionRecord, parse_version
from anabranch.schemas.versions import PolicyVersion


def read_versions(run_directory: Path) -> list[VersionRecord]:
    """Empty when there is no such file."""
    found: dict[tuple[int, int, str], VersionRecord] = {}
    try:
        lines = whole_lines(run_directory / VERSIONS_FILE)
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = parse_version(line)
        except ManifestError:  # a line that a full disk or a crash cut
            continue
        found.setdefault(record.name, record)
    return list(found.values())


def digests(run_directory: Path) -> dict[PolicyVersion, str]:
    """Policy -> root digest of its weights, of every version that is told of."""
    return {record.policy: record.result_digest for record in read_versions(run_directory)}
