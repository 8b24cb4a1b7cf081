"""Bytes written by version 1 of each format, committed: today's code reads them, and writes them again where a reader
elsewhere depends on the very bytes (hashes, digests, idempotent commits)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from anabranch.kernels.delta_codec import apply_changes, decode, encode_delta
from anabranch.kernels.digest import tensor_digest
from anabranch.schemas.delta_file import PREFIX, DeltaHeader, frame_bytes
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.trajectory import SCHEMA, Group, decode_group, read_batch
from anabranch.schemas.weight_index import IndexEntry
from tests.golden import samples
from tests.groups import same

GOLDEN = Path(__file__).parent


def stored(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def stored_entry() -> dict[bytes, bytes]:
    fields = {k.encode(): v.encode() for k, v in json.loads(stored("entry.envelope.json")).items()}
    return {**fields, b"payload": stored("entry.arrow")}


def test_a_stored_entry_is_read() -> None:
    envelope = open_envelope(stored_entry(), max_entry_bytes=1 << 20)
    assert (envelope.producer, envelope.seq, envelope.group_index) == ("east-4711-c0ffee", 17, 1234)
    assert same(decode_group(envelope.payload), samples.GROUP)


@pytest.mark.parametrize(
    ("name", "group"),
    [("entry.arrow", samples.GROUP), ("entry-1.1.arrow", samples.PARTIAL), ("entry-1.2.arrow", samples.TIMED)],
)
def test_a_batch_of_every_minor_version_is_read(name: str, group: Group) -> None:
    """1.0 has no `group_size`: as many were asked for as there are. 1.1 has no time of permit, reward and spool: 0, not known."""
    assert same(decode_group(stored(name)), group)
    assert read_batch(stored(name)).schema.names == SCHEMA.names


def test_the_envelope_is_sealed_as_it_was() -> None:
    """The payload's own bytes belong to Arrow's writer and may change with it; the envelope around them is ours."""
    assert samples.envelope_json(stored("entry.arrow")) == stored("entry.envelope.json")


def test_a_layout_keeps_its_bytes_and_its_hash() -> None:
    assert Layout.from_json(stored("layout.json")) == samples.LAYOUT
    assert samples.layout_json() == stored("layout.json")
    assert Layout.from_json(stored("layout.json")).hash == stored("layout.hash").decode().strip()


@pytest.mark.parametrize("kind", ["fork", "anchor", "delta", "skip"])
def test_a_manifest_is_read_and_written_as_it_was(kind: str) -> None:
    """A commit repeated by a restarted learner is recognised by its text."""
    assert Manifest.from_json(stored(f"manifest.{kind}.json")) == samples.manifests()[kind]
    assert samples.manifest_json(kind) == stored(f"manifest.{kind}.json")


def test_a_stored_signature_is_over_the_stored_bytes() -> None:
    """What is signed is a text of its own, so that a verifier elsewhere has to make the very same one."""
    manifest = Manifest.from_json(stored("manifest.delta.json"))
    assert manifest.signed_bytes() == stored("manifest.signed")
    assert manifest.signature is not None
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(manifest.signature.key))
    key.verify(bytes.fromhex(manifest.signature.signature), stored("manifest.signed"))
    with pytest.raises(InvalidSignature):
        key.verify(bytes.fromhex(manifest.signature.signature), stored("manifest.signed") + b" ")


def test_entries_of_the_index_are_read_and_written_as_they_were() -> None:
    lines = stored("index.txt").decode().splitlines()
    assert [IndexEntry.from_text(line) for line in lines] == [IndexEntry.of(m) for m in samples.manifests().values()]
    assert samples.index_entries() == stored("index.txt")


def unpacked(name: str) -> tuple[DeltaHeader, list[bytes]]:
    data = stored(name)
    at = PREFIX.size + frame_bytes(data[: PREFIX.size])
    header, chunks = DeltaHeader.unpack(data[: PREFIX.size], data[PREFIX.size : at]), []
    for chunk in header.manifest.chunks:
        chunks.append(data[at : at + chunk.size_bytes])
        at += chunk.size_bytes
    assert at == len(data)
    return header, chunks


@pytest.mark.parametrize("name", ["delta.abdelta", "anchor.abdelta"])
def test_a_delta_file_is_read_and_applied(name: str) -> None:
    header, chunks = unpacked(name)
    assert (header.layout, header.manifest.codec) == (samples.LAYOUT, "class-golomb/1")
    state = {name: bits.copy() for name, bits in samples.BASE.items()}
    apply_changes(state, decode(header.layout, chunks, state))
    assert all(np.array_equal(state[name], samples.NEW[name]) for name in samples.NEW)
    digests = {name: tensor_digest(bits) for name, bits in state.items()}
    assert root_digest(header.layout, digests) == header.manifest.result_digest


def test_sparse_chunks_are_written_as_they_were() -> None:
    """Chunks hold no zstd frame unless they are dense, so their bytes are ours alone; two encoders with the same states
    agree on them, and a restarted learner stores the same blob."""
    assert unpacked("delta.abdelta")[1] == list(encode_delta(samples.LAYOUT, samples.BASE, samples.NEW).chunks)


def test_every_committed_file_is_held_here() -> None:
    """And nothing stale lies around: regenerate with scripts/make_golden.py."""
    files = {p.name for p in GOLDEN.iterdir() if p.suffix not in (".py", ".pyc") and p.is_file()}
    assert files == {*samples.FILES, *samples.OLD_FILES}
