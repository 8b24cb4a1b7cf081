"""Entries of the weight index: what a manifest says of itself in one line, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from tests.unit.schemas.test_manifest import ANCHOR, FORK, HEX, base, manifest


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (manifest(), f"2:8:delta:2:7:15:2:{HEX}"),
        (manifest(**ANCHOR), f"2:8:anchor:-:-:15:2:{HEX}"),
        (manifest(**FORK), f"2:8:fork:1:8:0:0:{HEX}"),
        (manifest(kind="skip", base=base(4)), f"2:8:skip4:2:4:15:2:{HEX}"),
    ],
    ids=lambda value: value.label if isinstance(value, Manifest) else "",
)
def test_an_entry_says_what_its_manifest_says(made: Manifest, text: str) -> None:
    entry = IndexEntry.of(made)
    assert entry.to_text() == text
    assert IndexEntry.from_text(text) == entry
    assert (entry.policy, entry.base) == (made.policy, made.base.policy if made.base else None)
    assert (entry.payload_bytes, entry.chunks, entry.digest) == (made.payload_bytes, len(made.chunks), HEX)


def test_scores_sort_by_epoch_and_then_by_version_and_are_exact_as_doubles() -> None:
    policies = [
        PolicyVersion(0, 0),
        PolicyVersion(0, 2**32 - 1),
        PolicyVersion(1, 0),
        PolicyVersion(2**21 - 1, 2**32 - 1),
    ]
    scores = [IndexEntry(policy, "anchor", None, 0, 0, HEX).score for policy in policies]
    assert scores == sorted(set(scores))
    assert [int(float(score)) for score in scores] == scores


@pytest.mark.parametrize(
    "text",
    [
        "", "2:8", f"2:8:delta:2:7:15:2:{HEX}:more", f"x:8:delta:2:7:15:2:{HEX}", f"2:8:delta:2:-:15:2:{HEX}",
        f"2:8:delta:2:7:15.0:2:{HEX}", f"2:8:delta:2:7:-15:2:{HEX}", f"2:8:bogus:2:7:15:2:{HEX}", f"2:8:skip:2:4:15:2:{HEX}",
        f" 2:8:delta:2:7:15:2:{HEX}", f"2:8:delta:2:7:1_5:2:{HEX}", "2:8:delta:2:7:15:2:zz", f"2:8:delta:2:7:{'9' * 16}:2:{HEX}",
    ],
)  # fmt: skip
def test_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ManifestError, match="not an entry of the weight index"):
        IndexEntry.from_text(text)


@pytest.mark.parametrize(
    "text",
    [f"2:8:delta:2:8:15:2:{HEX}", f"2:8:fork:3:8:0:0:{HEX}", f"2:8:anchor:2:7:15:2:{HEX}", f"2:8:delta:-:-:1:1:{HEX}"],
)
def test_an_entry_leads_forward(text: str) -> None:
    with pytest.raises(ManifestError, match="does not lead forward"):
        IndexEntry.from_text(text)
