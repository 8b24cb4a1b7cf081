"""The header of a delta file: what it holds together, and that a damaged or lying one is refused by a named error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tracemalloc
from typing import Any

import pytest
import xxhash
import zstandard
from pydantic import ValidationError

from anabranch.schemas.delta_file import MAGIC, PREFIX, DeltaHeader, FileManifest, frame_bytes
from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk

LAYOUT = Layout.build([("a", "bf16", (3, 5)), ("b", "f32", ()), ("c", "u8", (0,))])


def digest(number: int) -> str:
    return xxhash.xxh3_128_hexdigest(str(number).encode())


def chunk(number: int, size_bytes: int) -> Chunk:
    return Chunk(digest=hashlib.sha256(str(number).encode()).hexdigest(), size_bytes=size_bytes)


def base(version: int = 6, epoch: int = 0) -> Base:
    return Base(epoch=epoch, version=version, digest=digest(0))


def header(layout: Layout = LAYOUT, **changes: Any) -> DeltaHeader:
    changed = changes.pop("changed", (4, 1, 0))
    stages = changes.pop("stages", (2,))
    fields: dict[str, Any] = {
        "run": "r", "epoch": 0, "version": 7, "base": base(),
        "result_digest": digest(1), "layout_hash": layout.hash, "codec": "class-golomb/1",
        "chunks": (chunk(2, 10), chunk(3, 5)),
        "full_bytes": layout.payload_bytes, "changed_elements": sum(changed),
        "total_elements": sum(t.numel for t in layout.tensors), "learner_step": 7, "fork_version": 0, "published_ms": 0,
    }  # fmt: skip
    return DeltaHeader(FileManifest.model_validate({**fields, **changes}), layout, changed, stages)


def unpack(packed: bytes) -> DeltaHeader:
    return DeltaHeader.unpack(packed[: PREFIX.size], packed[PREFIX.size :])


def packed_json(fields: object, **zstd: Any) -> bytes:
    """A header whose digest is right, whatever it says."""
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return sealed(zstandard.ZstdCompressor(**zstd).compress(content))


def sealed(frame: bytes) -> bytes:
    start = MAGIC + len(frame).to_bytes(4, "little")
    return start + xxhash.xxh3_128_digest(start + frame) + frame


def fields_of(packed: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(zstandard.ZstdDecompressor().decompress(packed[PREFIX.size :]))
    return fields


def test_round_trip() -> None:
    made = header()
    assert unpack(made.pack()) == made
    anchor = header(base=None, changed=(15, 1, 0))
    assert unpack(anchor.pack()) == anchor
    merged = header(stages=(1, 0, 1), changed=(40, 2, 0))
    assert unpack(merged.pack()) == merged


@pytest.mark.parametrize("version", [0, 3, 5, 6])
def test_a_file_joins_any_two_versions_of_an_epoch(version: int) -> None:
    """Not just those that a path of the channel would step on."""
    made = header(base=base(version))
    assert unpack(made.pack()) == made


@pytest.mark.parametrize(
    "changes", [{"base": base(7)}, {"base": base(8)}, {"base": base(6, epoch=1)}, {"epoch": 1}, {"kind": "delta"}]
)
def test_a_delta_that_does_not_go_forward_in_its_epoch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        header(**changes)


def test_it_is_small() -> None:
    """The file of a small step is about 20 KB; its header should not be seen in that."""
    names = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj"]
    layout = Layout.build([(f"model.layers.5.{name}.weight", "bf16", (576, 1536)) for name in names])
    made = header(layout, changed=tuple(3000 + i for i in range(6)), chunks=(chunk(2, 9),), stages=(1,))  # fmt: skip
    assert len(made.pack()) <= 500


def test_names_all_alike_are_packed_so_that_a_reader_unpacks_them() -> None:
    layout = Layout.build([(f"{i:06}" + "x" * 5000, "bf16", (1,)) for i in range(300)])
    made = header(layout, changed=(1,) * 300)
    assert unpack(made.pack()) == made


def test_every_flipped_byte_is_found() -> None:
    packed = header().pack()
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 0x10
        with pytest.raises(DeltaError):
            unpack(bytes(damaged))
    for cut in range(len(packed)):
        with pytest.raises(DeltaError):
            frame_bytes(packed[:cut]) if cut < PREFIX.size else unpack(packed[:cut])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layout_hash": digest(9)}, "layout_hash"),
        ({"full_bytes": 1}, "full_bytes"),
        ({"total_elements": 17}, "total_elements"),
        ({"changed_elements": 6}, "changed_elements"),
        ({"stages": (1,)}, "chunks"),
        ({"changed": (5, 0)}, "tensors"),
        ({"stages": ()}, "chunks"),
        ({"stages": (3, -1)}, "stages"),
        ({"changed": (16, 1, 0)}, "'a'"),
        ({"changed": (6, -1, 0)}, "'b'"),
        ({"base": None}, "'a'"),
        ({"base": None, "stages": (1, 1)}, "stages"),
    ],
)
def test_parts_that_disagree_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DeltaError, match=told):
        header(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"layout": None},
        {"layout": [["a", "bf16"]]},
        {"layout": [["a", "bf16", 3]]},
        {"layout": [["a", ["bf16"], [3]]]},
        {"layout": [[1, "bf16", [3]]]},
        {"layout": [["a", "bf17", [3]]]},
        {"layout": [["a", "bf16", [3.5]]]},
        {"layout": [["a", "bf16", [True]]]},
        {"layout": [["a", "bf16", [-1]]]},
        {"layout": [["a", "bf16", [2**63]]]},
        {"layout": [["a", "bf16", [1] * 65]]},
        {"layout": [["b", "bf16", [3]], ["a", "bf16", [3]]]},
        {"layout": [["a", "bf16", [3]], ["a", "bf16", [3]]]},
        {"changed": [4, 1, None]},
        {"changed": {"a": 1}},
        {"changed": [4, True, 0]},
        {"stages": 2},
        {"manifest": None},
        {"manifest": []},
        {"manifest": {"run": "r"}},
    ],
)
def test_a_header_that_is_sealed_but_wrong_is_refused(change: dict[str, Any]) -> None:
    fields = fields_of(header().pack())
    with pytest.raises((DeltaError, ManifestError)):
        unpack(packed_json({**fields, **change}))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 30000, b'{"layout":' + b"9" * 5000 + b"}"])
def test_what_is_no_json_of_a_header_is_refused(content: bytes) -> None:
    with pytest.raises(DeltaError):
        unpack(packed_json(content))


def test_a_frame_that_would_unpack_to_too_much_is_refused_before_it_is() -> None:
    bomb = packed_json(b" " * 2**28)
    assert len(bomb) < 2**15
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match="declares"):
            unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    with pytest.raises(DeltaError, match="declares"):
        unpack(packed_json(b"{}", write_content_size=False))
    with pytest.raises(DeltaError, match="zstd"):
        unpack(sealed(b"no frame"))
    with pytest.raises(DeltaError, match="zstd"):
        unpack(sealed(zstandard.compress(b"{}") + b"more"))


def windowed(content: bytes, window_log: int) -> bytes:
    """One frame of one raw block that asks for a window of 2^`window_log` bytes (RFC 8878, 3.1.1)."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0x80, window_log - 10 << 3]) + len(content).to_bytes(4, "little")
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    content = json.dumps(fields_of(header().pack())).encode()
    assert unpack(sealed(windowed(content, 23))) == header()
    for log in (24, 27, 31):
        with pytest.raises(DeltaError, match=f"window of {2**log} bytes"):
            unpack(sealed(windowed(content, log)))
    with pytest.raises(DeltaError, match="zstd"):
        unpack(sealed(windowed(content, 41)))


@pytest.mark.parametrize("changed", [0, 1])
def test_a_model_of_very_many_tensors_has_a_header_that_is_read(changed: int) -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{n}_proj.weight"
        for i in range(20)
        for e in range(256)
        for n in ("up", "down")
    ]
    layout = Layout.build([(name, "bf16", (2048, 7168)) for name in names])
    made = header(layout, changed=(changed,) * len(names))
    packed = made.pack()
    assert unpack(packed) == made
    assert len(packed) < len(names) * 12, "bytes a tensor"


def test_more_values_than_a_reader_takes_are_not_written() -> None:
    layout = Layout.build([(f"{i:x}", "u8", (1,)) for i in range(40_000)])
    with pytest.raises(DeltaError, match="JSON values"):
        header(layout, changed=(1,) * 40_000).pack()


def test_another_file_is_told_from_a_delta() -> None:
    for other in (b"PK", b"\x10\0\0\0\0\0\0\0{}" + bytes(20)):
        with pytest.raises(DeltaError, match="not a delta file"):
            frame_bytes(other)


def test_a_header_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        header().changed = ()  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, 4, 8, PREFIX.size - 1])
def test_a_file_shorter_than_the_prefix_is_told_so(size: int) -> None:
    with pytest.raises(DeltaError, match=f"cut short: {size} bytes where {PREFIX.size} belong before its header"):
        frame_bytes(header().pack()[:size])
