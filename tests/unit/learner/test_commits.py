"""Rank 0's decisions: when an anchor is due, which skips are worth their place, whose records count."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.learner.known_entries import KnownEntries
from anabranch.learner.share_record import ShareRecord, read_record
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.signing import load_signer, write_key_pair
from anabranch.transport.weight_path import FETCH_BYTES


def at(version: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, version)


def entry(version: int, label: str, size: int, base: int | None = None, *, epoch: int = 1) -> IndexEntry:
    return IndexEntry(at(version, epoch), label, None if base is None else at(base, epoch), size, 1, f"{version:032x}")


def test_an_anchor_is_due_when_the_way_costs_more_than_one() -> None:
    known = KnownEntries([entry(0, "anchor", 100)], reach=8)
    due = []
    for version in range(1, 5):
        known.add(entry(version, "delta", 30, version - 1))
        due.append(known.anchor_is_due(at(version)))
    assert due == [False, False, False, True]
    known.add(entry(4, "skip4", 60, 0))
    known.add(entry(5, "delta", 30, 4))
    assert not known.anchor_is_due(at(5)), "by the skip it costs 90"
    known.add(entry(6, "delta", 30, 5))
    assert known.anchor_is_due(at(6))
    known.add(entry(6, "anchor", 110))
    assert not known.anchor_is_due(at(6))
    known.add(entry(7, "delta", 111, 6))
    assert known.anchor_is_due(at(7))


def test_an_epoch_that_begins_as_a_fork_counts_from_the_anchor_before_it() -> None:
    fork = IndexEntry(at(1, 2), "fork", at(1, 1), 0, 0, f"{1:032x}")
    known = KnownEntries([entry(0, "anchor", 100), entry(1, "delta", 60, 0), fork], reach=8)
    assert not known.anchor_is_due(at(1, 2))
    known.add(entry(2, "delta", 60, 1, epoch=2))
    assert known.anchor_is_due(at(2, 2))


def test_an_anchor_is_due_when_retention_has_taken_the_cheap_way() -> None:
    known = KnownEntries([entry(0, "anchor", 100)], reach=8)
    for version in range(1, 5):
        known.add(entry(version, "delta", 30, version - 1))
    known.add(entry(4, "skip4", 60, 0))
    assert not known.anchor_is_due(at(4))
    known.forget([entry(4, "skip4", 60, 0)])
    assert known.anchor_is_due(at(4))


def test_an_anchor_is_due_when_there_is_no_way_at_all() -> None:
    assert KnownEntries([entry(1, "delta", 5, 0)], reach=8).anchor_is_due(at(1))


def test_a_skip_is_worth_its_place_when_a_follower_would_take_it() -> None:
    known = KnownEntries([entry(0, "anchor", 10**9)], reach=8)
    for version in range(1, 5):
        known.add(entry(version, "delta", 100_000, version - 1))
    whole = 4 * (100_000 + FETCH_BYTES) - FETCH_BYTES
    assert known.is_worth(entry(4, "skip4", whole - 1, 0))
    assert not known.is_worth(entry(4, "skip4", whole, 0))
    known.add(entry(2, "skip2", 1000, 0))
    known.add(entry(4, "skip2", 1000, 2))
    assert not known.is_worth(entry(4, "skip4", 2000 + FETCH_BYTES, 0)), "two shorter skips are cheaper"
    assert known.is_worth(entry(4, "skip4", 2000, 0))


def test_what_is_known_stays_small() -> None:
    known = KnownEntries([entry(0, "anchor", 10**9)], reach=4)
    for version in range(1, 5000):
        known.add(entry(version, "delta", 10, version - 1))
        if version % 4 == 0:
            known.add(entry(version, "skip4", 20, version - 4))
    assert len(known._entries) < 4000, "of 6250"
    assert not known.anchor_is_due(at(4999))
    assert known.is_worth(entry(5000, "skip4", 5, 4996))


def record(**fields: object) -> ShareRecord:
    return ShareRecord(**({"run": "r", "epoch": 1, "version": 3, "label": "delta", "rank": 1} | fields))  # type: ignore[arg-type]


def test_a_record_is_read_back() -> None:
    made = record(changed_elements=7, sums=((0, 2**64 - 1, 5),))
    again = read_record(made.to_text(None), run="r", policy=at(3), label="delta", rank=1, signer=None)
    assert again == made
    assert again.sums_by_tensor() == {0: (2**64 - 1, 5)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a share record"),
        ("{}", "not a share record"),
        (record(rank=2).to_text(None), "is a record of rank 2, delta e1.v3"),
        (record(version=4).to_text(None), "is a record of rank 1, delta e1.v4"),
        (record(run="other").to_text(None), "is a record of rank 1"),
        (record().to_text(None).replace('"rank":1', '"rank":1,"more":0'), "not a share record"),
        (record(sums=((0, 1, 1),)).to_text(None).replace("[0,1,1]", f"[0,1,{2**64}]"), "not a share record"),
        ("x" * (64 * 2**20 + 1), "the limit is"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ManifestError, match=rf"what rank 1 has left of delta e1\.v3 .*{why}"):
        read_record(text, run="r", policy=at(3), label="delta", rank=1, signer=None)


def test_where_manifests_are_signed_records_must_be_too(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_key_pair(tmp_path / name)
    ours, theirs = load_signer(tmp_path / "ours"), load_signer(tmp_path / "theirs")

    def read(text: str) -> ShareRecord:
        return read_record(text, run="r", policy=at(3), label="delta", rank=1, signer=ours)

    signed = record(changed_elements=7).to_text(ours)
    assert read(signed).changed_elements == 7
    for text in (
        record().to_text(None),
        record().to_text(theirs),
        signed.replace('"changed_elements":7', '"changed_elements":8'),
    ):
        with pytest.raises(ManifestError, match="refused"):
            read(text)
