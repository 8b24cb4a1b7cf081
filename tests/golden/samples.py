"""What the committed bytes in this folder say. `scripts/make_golden.py` writes them; test_golden.py holds today's code
to them. Change a sample only together with the major version of its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from anabranch.kernels.delta_codec import CODEC, Encoded, encode_anchor, encode_delta
from anabranch.kernels.digest import tensor_digest
from anabranch.schemas.delta_file import DeltaHeader, FileManifest
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Base, Chunk, Manifest, Signature
from anabranch.schemas.trajectory import Group, Rollout, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.blob_store import blob_digest

GROUP = Group(
    run="golden",
    region="east",
    producer="east-4711-c0ffee",
    group_index=1234,
    attempt=1,
    prompt_token_ids=np.array([257, 51, 32, 43, 32, 52], np.int32),
    prompt_text="3 + 4 = ?  → α",
    answer="7",
    rollouts=(
        Rollout(
            sample_index=0,
            token_ids=np.array([55, 258], np.int32),
            logprobs=np.array([-0.25, -1.401298464324817e-45], np.float32),  # the smallest denormal survives
            spans=(VersionSpan(PolicyVersion(2, 40), 0),),
            reward=1.0,
            finish_reason="stop",
            text="7",
            started_ms=1_767_225_600_000,
            finished_ms=1_767_225_600_123,
        ),
        Rollout(
            sample_index=1,
            token_ids=np.array([32, 53, 53, 53], np.int32),
            logprobs=np.array([-3.5, -0.0, -17.25, -0.125], np.float32),
            spans=(VersionSpan(PolicyVersion(2, 40), 0), VersionSpan(PolicyVersion(2, 42), 3)),
            reward=0.0,
            finish_reason="length",
            text=" 555",
            started_ms=1_767_225_600_000,
            finished_ms=1_767_225_600_456,
        ),
    ),
)
PARTIAL = replace(GROUP, group_size=3)  # its third rollout was not finished at the deadline
TIMED = replace(
    PARTIAL,
    permit_ms=1_767_225_599_900,
    spooled_ms=1_767_225_600_470,
    rollouts=tuple(replace(r, scored_ms=1_767_225_600_460 + r.sample_index) for r in GROUP.rollouts),
)
SEQ = 17
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))

LAYOUT = Layout.build(
    [
        ("model.embed_tokens.weight", "bf16", (5, 4)),
        ("model.layers.0.mlp.gate_proj.weight", "bf16", (300, 2)),
        ("model.norm.weight", "f32", (4,)),
        ("model.step", "i64", ()),
    ]
)
_i = np.arange(600)
BASE: dict[str, Any] = {
    "model.embed_tokens.weight": np.arange(20, dtype=np.uint16) + 0x3F80,
    # exponents 120, 121 (the most) and 122, either sign
    "model.layers.0.mlp.gate_proj.weight": (
        (_i % 2) << 15 | (120 + (_i % 7 > 0) + (_i % 11 == 5)) << 7 | (_i * 37) % 128
    ).astype(np.uint16),
    "model.norm.weight": np.array([0, 1, 2, 3], np.uint32),
    "model.step": np.array([40], np.uint64),
}
NEW: dict[str, Any] = {
    "model.embed_tokens.weight": BASE["model.embed_tokens.weight"],  # unchanged: in no segment
    "model.layers.0.mlp.gate_proj.weight": BASE["model.layers.0.mlp.gate_proj.weight"].copy(),
    "model.norm.weight": np.array([0x3F800000, 0x80000000, 0x7FC00001, 3], np.uint32),  # 1.0, −0.0, a NaN: all anew
    "model.step": np.array([41], np.uint64),
}
NEW["model.layers.0.mlp.gate_proj.weight"][[7, 40, 41, 300]] += 1  # one step away from zero
NEW["model.layers.0.mlp.gate_proj.weight"][[203, 599]] -= 1  # and towards it
NEW["model.layers.0.mlp.gate_proj.weight"][450] = 0x7FC1  # a NaN with a payload


def envelope_json(payload: bytes) -> bytes:
    """The entry's fields as text, but for the payload, which is the other file."""
    fields = Envelope(GROUP.producer, SEQ, GROUP.group_index, payload).seal()
    text = {name: value.decode() for name, value in fields.items() if name != "payload"}
    return (json.dumps(text, indent=1) + "\n").encode()


def layout_json() -> bytes:
    return LAYOUT.to_json().encode()


def layout_hash() -> bytes:
    return f"{LAYOUT.hash}\n".encode()


def delta_header(kind: Literal["anchor", "delta"], encoded: Encoded) -> DeltaHeader:
    root = {
        k: root_digest(LAYOUT, {n: tensor_digest(b) for n, b in s.items()}) for k, s in {"b": BASE, "n": NEW}.items()
    }
    base = Base(epoch=2, version=40, digest=root["b"]) if kind == "delta" else None
    manifest = FileManifest(
        run="golden", epoch=2, version=41, base=base, result_digest=root["n"], layout_hash=LAYOUT.hash, codec=CODEC,
        chunks=tuple(Chunk(digest=blob_digest(c), size_bytes=len(c)) for c in encoded.chunks),
        full_bytes=LAYOUT.payload_bytes, changed_elements=encoded.changed_elements,
        total_elements=sum(t.numel for t in LAYOUT.tensors), learner_step=41, fork_version=38,
        published_ms=1_767_225_601_000,
    )  # fmt: skip
    return DeltaHeader(manifest, LAYOUT, encoded.changed_by_tensor, (len(encoded.chunks),))


def delta_file() -> bytes:
    encoded = encode_delta(LAYOUT, BASE, NEW)
    return delta_header("delta", encoded).pack() + b"".join(encoded.chunks)


def anchor_file() -> bytes:
    encoded = encode_anchor(LAYOUT, NEW)
    return delta_header("anchor", encoded).pack() + b"".join(encoded.chunks)


def manifests() -> dict[str, Manifest]:
    """One of each kind; the delta is signed with `SIGNING_KEY`."""
    common: dict[str, Any] = {
        "run": "golden", "layout_hash": LAYOUT.hash, "codec": CODEC, "full_bytes": LAYOUT.payload_bytes,
        "total_elements": 625, "learner_step": 40, "fork_version": 38, "published_ms": 1_767_225_601_000,
    }  # fmt: skip
    states = {version: f"{version:032x}" for version in (38, 39, 40)}

    def made(kind: str, version: int, base: Base | None, sizes: tuple[int, ...], changed: int) -> Manifest:
        chunks = tuple(Chunk(digest=blob_digest(bytes(size)), size_bytes=size) for size in sizes)
        return Manifest(
            kind=kind, epoch=2, version=version, base=base, result_digest=states[version], chunks=chunks,
            changed_elements=changed, **common,
        )  # fmt: skip

    def state(version: int, epoch: int = 2) -> Base:
        return Base(epoch=epoch, version=version, digest=states[version])

    delta = made("delta", 40, state(39), (91,), 8)
    key = SIGNING_KEY.public_key().public_bytes_raw().hex()
    signature = Signature(key=key, signature=SIGNING_KEY.sign(delta.signed_bytes()).hex())
    return {
        "fork": made("fork", 38, state(38, epoch=1), (), 0),
        "anchor": made("anchor", 40, None, (900, 17), 625),
        "delta": delta.model_copy(update={"signature": signature}),
        "skip": made("skip", 40, state(38), (120,), 11),
    }


def manifest_json(kind: str) -> bytes:
    return manifests()[kind].model_dump_json().encode()


def index_entries() -> bytes:
    return "".join(f"{IndexEntry.of(made).to_text()}\n" for made in manifests().values()).encode()


# Written by programs that are out there, and by no program any more: trajectory schema 1.0, before `group_size`, and 1.1,
# before `permit_ms`, `scored_ms` and `spooled_ms`.
OLD_FILES = ("entry.arrow", "entry.envelope.json", "entry-1.1.arrow")
FILES: dict[str, Callable[[], bytes]] = {
    "entry-1.2.arrow": lambda: encode_group(TIMED),
    "layout.json": layout_json,
    "layout.hash": layout_hash,
    **{f"manifest.{kind}.json": partial(manifest_json, kind) for kind in manifests()},
    "manifest.signed": lambda: manifests()["delta"].signed_bytes(),
    "index.txt": index_entries,
    "delta.abdelta": delta_file,
    "anchor.abdelta": anchor_file,
}
