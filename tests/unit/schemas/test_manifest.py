from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import MAX_CHUNK_BYTES, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion

HEX = "0123456789abcdef" * 2


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "kind": "delta", "run": "r", "epoch": 2, "version": 7, "base_version": 6, "base_digest": HEX,
        "result_digest": HEX, "layout_hash": HEX, "codec": "class-golomb/1",
        "chunks": (Chunk(digest=HEX, size_bytes=10), Chunk(digest=HEX[::-1], size_bytes=5)),
        "full_bytes": 1000, "changed_elements": 3, "total_elements": 500, "learner_step": 7, "fork_version": 4,
        "published_ms": 1,
    }  # fmt: skip
    return Manifest.model_validate({**fields, **changes})


ANCHOR = {"kind": "anchor", "base_version": None, "base_digest": None}


def test_json_round_trip_and_what_it_says() -> None:
    for made in (manifest(), manifest(**ANCHOR)):
        assert Manifest.from_json(made.model_dump_json()) == made
    assert manifest().policy == PolicyVersion(2, 7)
    assert manifest().payload_bytes == 15


@pytest.mark.parametrize(
    "changes",
    [
        {"base_version": None},
        {"base_digest": None},
        {"base_version": 7},
        {"base_version": 8},
        {"kind": "anchor"},
        {**ANCHOR, "base_version": 3},
        {**ANCHOR, "base_digest": HEX},
        {"kind": "patch"},
        {"format": "anabranch.manifest/2"},
        {"epoch": -1},
        {"version": -1},
        {"result_digest": HEX.upper()},
        {"result_digest": HEX[:-1]},
        {"layout_hash": HEX + "\n"},
        {"chunks": ({"digest": HEX, "size_bytes": MAX_CHUNK_BYTES + 1},)},
        {"chunks": ({"digest": HEX, "size_bytes": -1},)},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_binds_to_nothing_or_to_anything_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        manifest(**changes)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        manifest().version = 8


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": "anabranch.manifest/1"}', b"\xff", "[" * 10_000])
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
    assert made.base_version is not None
    assert made.base_version < made.version
