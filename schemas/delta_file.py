"""The header of a delta file: which two states it joins, over which tensors, and in which chunks.

Invariant: a header that `DeltaHeader.unpack` returns is the one that was packed (its digest was checked first), and its
parts agree: the base is an earlier version of the same epoch, the manifest's layout hash, sizes and counts are those of the layout, the changed elements and the stages
add up. What it unpacks to is bounded by the size of its frame, and the memory that takes by the size of its JSON (24 times).
Held by tests/unit/schemas/test_delta_file.py and tests/unit/schemas/test_delta_header_fuzz.py.

A delta file holds little-endian, without padding

    0   8 bytes   magic "ABDELTA2"
    8   u32       size of the header frame in bytes
    12  16 bytes  xxh3-128 (canonical, big-endian) of bytes 0..12 followed by the header frame
    28            header: one zstd frame of JSON with `manifest`, `layout`, `changed`, `stages`
    then          the chunks, in the manifest's order, back to back, to the end of the file

The manifest is much like that of a version on the channel (schemas/manifest.py), and its chunks are blobs of the channel, under
the same digests. But a file may join any two versions of an epoch, not just those that the channel's paths are made of.

`layout` is a list of [name, dtype, shape] sorted by name, `changed` one count of changed elements per tensor of it.
`stages` says how many chunks each stage has: normally there is one; a file merged without its base holds several deltas
one after another, each of which applies to the state that the one before leaves, and `changed` is their sum.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal, Self

import xxhash
import zstandard
from pydantic import Field, ValidationError, model_validator

from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import HEX128, Base, Chunk, Frozen

MAGIC = b"ABDELTA2"
PREFIX = struct.Struct("<8sI16s")
_DIGESTED = struct.Struct("<8sI")  # the part of the prefix that the digest covers
_KEYS = {"manifest", "layout", "changed", "stages"}
# Limits of what a frame unpacks to. Real headers unpack to 3 to 22 times their frame: the digests of chunks and the changed
# elements of tensors look random. One of 45,000 tensors of which none changed would reach 106, and is packed less well.
_FREE_BYTES, _MAX_EXPANSION = 2**16, 32
_LEVELS = (19, 3, -5, -50, -1000, -131_072)
_MAX_WINDOW_BYTES = 2**23  # what level 19 asks for, of a frame that is larger than that
# A value of JSON takes up to 100 bytes of memory, and 3 bytes of text. Real headers have one in 5 to 18 bytes.
_FREE_VALUES, _BYTES_PER_VALUE = 2**16, 6
_MAX_TOLD = 400  # characters of an error about what a stranger wrote
_MAX_DIMENSIONS, _MAX_DIMENSION = 64, 2**63


class FileManifest(Frozen):
    """What a file holds: an anchor, or the change from `base`, any version before this one of the same epoch."""

    run: str = Field(max_length=100)
    epoch: int = Field(ge=0)
    version: int = Field(ge=0, description="policy version that results")
    base: Base | None = None
    result_digest: str = Field(pattern=HEX128)
    layout_hash: str = Field(pattern=HEX128)
    codec: str = Field(max_length=100)
    chunks: tuple[Chunk, ...] = Field(strict=False)
    full_bytes: int = Field(ge=0, description="bytes of the dense state")
    changed_elements: int = Field(ge=0)
    total_elements: int = Field(ge=0)
    learner_step: int = Field(ge=0)
    fork_version: int = Field(ge=0)
    published_ms: int = Field(ge=0, description="0 for a file that was made of files")

    @model_validator(mode="after")
    def _after_its_base(self) -> Self:
        if self.base and (self.base.epoch != self.epoch or self.base.version >= self.version):
            raise ValueError(f"a delta goes from {self.base.policy} to epoch {self.epoch}, version {self.version}")
        return self

    @property
    def kind(self) -> Literal["anchor", "delta"]:
        return "delta" if self.base else "anchor"

    @property
    def payload_bytes(self) -> int:
        return sum(c.size_bytes for c in self.chunks)


_MANIFEST_KEYS = FileManifest.model_fields.keys()


@dataclass(frozen=True)
class DeltaHeader:
    """`changed`: elements per tensor of `layout`, summed over the stages; `stages`: chunks of each stage."""

    manifest: FileManifest
    layout: Layout
    changed: tuple[int, ...]
    stages: tuple[int, ...]

    def __post_init__(self) -> None:
        manifest, layout = self.manifest, self.layout
        elements = [t.numel for t in layout.tensors]
        facts: list[tuple[str, object, object]] = [
            ("layout_hash", manifest.layout_hash, layout.hash),
            ("full_bytes", manifest.full_bytes, layout.payload_bytes),
            ("total_elements", manifest.total_elements, sum(elements)),
            ("changed_elements", manifest.changed_elements, sum(self.changed)),
            ("number of chunks", len(manifest.chunks), sum(self.stages)),
            ("number of tensors", len(self.changed), len(elements)),
        ]
        for what, told, is_ in facts:
            if told != is_:
                raise DeltaError(f"the header contradicts itself: its {what} is {told}, its other parts say {is_}")
        if not self.stages or min(self.stages) < 0 or (manifest.kind == "anchor" and len(self.stages) != 1):
            raise DeltaError(f"the header says {manifest.kind}, with stages {list(self.stages)[:9]}")
        for spec, changed, numel in zip(layout.tensors, self.changed, elements, strict=True):
            least = numel if manifest.kind == "anchor" else 0
            if not least <= changed <= numel * len(self.stages):
                raise DeltaError(f"the header says that {changed} of {numel} elements of {spec.name!r} change")

    def pack(self) -> bytes:
        """Prefix and header frame: all of the file that stands before its chunks."""
        content = json.dumps(
            {
                "manifest": self.manifest.model_dump(mode="json", exclude_defaults=True),
                "layout": [[t.name, t.dtype, t.shape] for t in self.layout.tensors],
                "changed": self.changed,
                "stages": self.stages,
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        _check_values(content)
        for level in _LEVELS:
            frame = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(content)
            if len(content) <= _FREE_BYTES + _MAX_EXPANSION * len(frame):
                break
        else:
            raise DeltaError(f"a header of {len(content)} bytes packs to {len(frame)}: no reader would unpack it")
        start = _DIGESTED.pack(MAGIC, len(frame))
        return start + xxhash.xxh3_128_digest(start + frame) + frame

    @classmethod
    def unpack(cls, prefix: bytes, frame: bytes) -> DeltaHeader:
        """Inverse of `pack`, given the first `PREFIX.size` bytes and the frame of `frame_bytes(prefix)` bytes.

        Raises:
            DeltaError: not a delta file, a wrong digest, a frame that unpacks to too much, parts that disagree.
            ManifestError: a manifest or a layout that breaks its own rules.
        """
        expected = PREFIX.unpack(prefix)[2]
        if len(frame) != frame_bytes(prefix) or xxhash.xxh3_128_digest(prefix[: _DIGESTED.size] + frame) != expected:
            raise DeltaError("the header does not have its digest: the file is damaged")
        content = _unpack_frame(frame)
        _check_values(content)
        try:
            fields: Any = json.loads(content.decode())
            if not isinstance(fields, dict) or set(fields) != _KEYS:
                raise DeltaError(f"the header is not a JSON object with {', '.join(sorted(_KEYS))}")
            parts = _layout(fields["layout"]), _counts(fields["changed"]), _counts(fields["stages"])
            return cls(_manifest(fields["manifest"]), *parts)
        except (ValueError, TypeError, RecursionError) as error:
            known = isinstance(error, (DeltaError, ManifestError))
            kind = ManifestError if isinstance(error, ManifestError) else DeltaError
            text = str(error) if known else f"the header is not the JSON of a delta: {error}"
            raise kind(text if len(text) <= _MAX_TOLD else f"{text[:_MAX_TOLD]}...") from error


def frame_bytes(prefix: bytes) -> int:
    """Size of the header frame that follows `prefix`. Raises DeltaError if these are not the first bytes of a delta."""
    if len(prefix) < PREFIX.size and MAGIC.startswith(prefix[: len(MAGIC)]):
        raise DeltaError(f"the file is cut short: {len(prefix)} bytes where {PREFIX.size} belong before its header")
    if len(prefix) != PREFIX.size or not prefix.startswith(MAGIC):
        raise DeltaError(f"not a delta file: it starts with {prefix[: len(MAGIC)]!r}, a delta file with {MAGIC!r}")
    return int(PREFIX.unpack(prefix)[1])


def _unpack_frame(frame: bytes) -> bytes:
    limit = _FREE_BYTES + _MAX_EXPANSION * len(frame)
    try:
        asked = zstandard.get_frame_parameters(frame)
        if asked.content_size > limit:  # an unknown size is 2**64 − 1 and fails here as well
            raise DeltaError(
                f"the header declares {asked.content_size} bytes; a frame of {len(frame)} may hold {limit}"
            )
        if asked.window_size > max(asked.content_size, _MAX_WINDOW_BYTES):
            raise DeltaError(f"the header asks for a zstd window of {asked.window_size} bytes")
        unpacked = zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the header is not a readable zstd frame: {error}") from error
    return bytes(unpacked)


def _check_values(content: bytes) -> None:
    """Before objects are made of it. What stands in strings is counted as well: names hold few of these."""
    values, most = sum(map(content.count, (b"[", b"{", b",", b":"))), _FREE_VALUES + len(content) // _BYTES_PER_VALUE
    if values > most:
        raise DeltaError(f"the header has about {values} JSON values; one of {len(content)} bytes may have {most}")


def _manifest(fields: Any) -> FileManifest:
    """Chunks one by one, so that the first bad one ends it: of each an error would be kept, and they are larger."""
    if (
        not isinstance(fields, dict)
        or not fields.keys() <= _MANIFEST_KEYS
        or not isinstance(fields.get("chunks"), list)
    ):
        raise ManifestError("the header's manifest is not a JSON object with a list of chunks")
    try:
        chunks = tuple(map(Chunk.model_validate, fields["chunks"]))
        manifest = FileManifest.model_validate({**fields, "chunks": chunks})
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ManifestError(f"not a weight manifest: {told}") from None
    _check_text(manifest.run)
    _check_text(manifest.codec)
    return manifest


def _check_text(text: str) -> None:
    """Half of a surrogate pair, which JSON lets through, is no text that could be written anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"the header holds {text!a}, which is no text") from None


def _layout(rows: Any) -> Layout:
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in rows:
        sizes = len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and 0 <= n < _MAX_DIMENSION for n in shape)
        if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list) and sizes):
            raise ManifestError("the header's layout is not a list of [name, dtype, shape]")
        _check_text(name)
        if specs and specs[-1][0] >= name:
            raise ManifestError(f"the header's layout is not sorted by name: {name!r} follows {specs[-1][0]!r}")
        specs.append((name, dtype, tuple(shape)))
    return Layout.build(specs)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(n) is not int for n in values):
        raise DeltaError("the header's changed and stages are not lists of numbers")
    return tuple(values)
