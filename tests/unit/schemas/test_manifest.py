from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, Base, Chunk, Manifest, Signature
from anabranch.schemas.versions import PolicyVersion

HEX = "0123456789abcdef" * 2
BLOB = HEX * 2


def base(version: int = 7, epoch: int = 2, digest: str = HEX) -> Base:
    return Base(epoch=epoch, version=version, digest=digest)


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "kind": "delta", "run": "r", "epoch": 2, "version": 8, "base": base(),
        "result_digest": HEX, "layout_hash": HEX, "codec": "class-golomb/1",
        "chunks": (Chunk(digest=BLOB, size_bytes=10), Chunk(digest=BLOB[::-1], size_bytes=5)),
        "full_bytes": 1000, "changed_elements": 3, "total_elements": 500, "learner_step": 8, "fork_version": 4,
        "published_ms": 1,
    }  # fmt: skip
    return Manifest.model_validate({**fields, **changes})


ANCHOR: dict[str, object] = {"kind": "anchor", "base": None}
FORK: dict[str, object] = {"kind": "fork", "base": base(8, epoch=1), "chunks": ()}


@pytest.mark.parametrize(
    ("changes", "label", "steps"),
    [
        ({}, "delta", 1),
        (ANCHOR, "anchor", 0),
        (FORK, "fork", 0),
        ({"kind": "skip", "base": base(6)}, "skip2", 2),
        ({"kind": "skip", "base": base(0)}, "skip8", 8),
        ({"kind": "skip", "version": 12, "base": base(8)}, "skip4", 4),
        ({"signature": Signature(key=BLOB, signature=BLOB * 2)}, "delta", 1),
    ],
)
def test_json_round_trip_and_what_it_says(changes: dict[str, object], label: str, steps: int) -> None:
    made = manifest(**changes)
    assert Manifest.from_json(made.model_dump_json()) == made
    assert (made.label, made.steps) == (label, steps)


def test_it_names_its_states_and_its_size() -> None:
    made = manifest()
    assert made.policy == PolicyVersion(2, 8)
    assert made.base is not None
    assert made.base.policy == PolicyVersion(2, 7)
    assert made.payload_bytes == 15


@pytest.mark.parametrize(
    "changes",
    [
        {"base": None},
        {"base": base(8)},
        {"base": base(9)},
        {"base": base(6)},
        {"base": base(7, epoch=1)},
        {**ANCHOR, "base": base()},
        {"kind": "skip"},
        {"kind": "skip", "base": base(5)},
        {"kind": "skip", "base": base(8)},
        {"kind": "skip", "base": base(9)},
        {"kind": "skip", "version": 10, "base": base(6)},
        {"kind": "skip", "base": base(6, epoch=1)},
        {"kind": "skip", "base": None},
        {**FORK, "base": None},
        {**FORK, "base": base(8)},
        {**FORK, "base": base(8, epoch=3)},
        {**FORK, "base": base(7, epoch=1)},
        {**FORK, "base": base(8, epoch=1, digest=HEX[::-1])},
        {**FORK, "chunks": (Chunk(digest=BLOB, size_bytes=1),)},
        {"kind": "patch"},
        {"format": "anabranch.manifest/1"},
        {"epoch": -1},
        {"epoch": 2**21, "base": base(epoch=2**21)},
        {"version": -1},
        {"version": 2**32, "base": base(2**32 - 1)},
        {"result_digest": HEX.upper()},
        {"result_digest": HEX[:-1]},
        {"layout_hash": HEX + "\n"},
        {"chunks": ({"digest": BLOB, "size_bytes": MAX_CHUNK_BYTES + 1},)},
        {"chunks": ({"digest": BLOB, "size_bytes": -1},)},
        {"chunks": ({"digest": HEX, "size_bytes": 1},)},
        {"signature": {"key": BLOB}},
        {"signature": {"key": BLOB, "signature": BLOB}},
        {"published_ms": 2**63},
        {"full_bytes": 2**63},
        {"fork_version": 2**32},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_binds_to_nothing_or_to_anything_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        manifest(**changes)


def test_what_is_signed_is_everything_but_the_signature() -> None:
    plain = manifest()
    signed = manifest(signature=Signature(key=BLOB, signature=BLOB * 2))
    assert signed.signed_bytes() == plain.signed_bytes()
    others = [
        {"run": "s"}, {"base": base(digest=HEX[::-1])}, {"result_digest": HEX[::-1]}, {"published_ms": 2}, ANCHOR,
        {"chunks": (Chunk(digest=BLOB[::-1], size_bytes=10), Chunk(digest=BLOB, size_bytes=5))}, {"learner_step": 9},
    ]  # fmt: skip
    texts = [manifest(**change).signed_bytes() for change in others]
    assert len({plain.signed_bytes(), *texts}) == len(others) + 1


def test_a_text_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ManifestError, match="the limit is"):
        Manifest.from_json(b" " * (MAX_MANIFEST_BYTES + 1))


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        manifest().version = 8


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": "anabranch.manifest/2"}', b"\xff", "[" * 10_000])
def test_text_that_is_no_manifest_is_refused(text: str | bytes) -> None:
    with pytest.raises(ManifestError, match="not a weight manifest"):
        Manifest.from_json(text)


@settings(max_examples=200)
@given(st.data())
def test_mutated_json_is_refused_or_still_a_manifest(data: st.DataObject) -> None:
    text = bytearray(manifest().model_dump_json().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = Manifest.from_json(bytes(text))
    except ManifestError:
        return
    assert made.kind == "delta"
    assert made.base is not None
    assert made.base.policy == PolicyVersion(made.epoch, made.version - 1)
