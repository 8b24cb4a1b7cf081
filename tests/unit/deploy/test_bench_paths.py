"""What a follower n versions behind fetches: counted over every pair of versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deploy.bench_paths import index_of_run, measure
from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry


def entry(version: int, base: int | None, size: int, label: str) -> IndexEntry:
    at = None if base is None else PolicyVersion(1, base)
    return IndexEntry(PolicyVersion(1, version), label, at, size, 1, f"{version:032x}")


def channel(last: int, *, skip_bytes: int) -> list[IndexEntry]:
    entries = [entry(0, None, 10**6, "anchor"), *(entry(v, v - 1, 10**5, "delta") for v in range(1, last + 1))]
    return entries + [entry(v, v - 2, skip_bytes, "skip2") for v in range(2, last + 1, 2)]


def test_every_pair_counts_and_the_worst_is_shown() -> None:
    rows = {row.behind: row for row in measure(channel(4, skip_bytes=10**5))}
    assert sorted(rows) == [1, 2, 4]
    assert (rows[1].pairs, rows[1].fetches_max, rows[1].of_chain_max) == (4, 1, 1.0)
    # from 0 and 2 the skip alone, half of the chain; from 1 there is none
    assert (rows[2].pairs, rows[2].fetches_max, rows[2].of_chain_median, rows[2].of_chain_max) == (3, 2, 0.5, 1.0)
    assert (rows[4].pairs, rows[4].fetches_max, rows[4].of_chain_max, rows[4].fetches_allowed) == (1, 2, 0.5, 6)


def test_a_chain_with_a_hole_has_nothing_to_compare_with() -> None:
    entries = [e for e in channel(4, skip_bytes=1) if (e.policy.version, e.label) != (2, "delta")]
    with pytest.raises(ManifestError, match=r"the chain from e1\.v1 to e1\.v2 is not whole"):
        measure(entries)


def test_a_run_without_its_data_says_how_to_keep_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keep-redis"):
        index_of_run(tmp_path)
