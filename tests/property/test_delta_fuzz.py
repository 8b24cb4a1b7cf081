"""100,000 damaged payloads: a named error each or changes inside the layout; no crash, no hang, no memory to speak of.

The work is done in a process of its own whose memory is limited: an allocation that follows a number from the wire
instead of the layout ends it.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import (
    TensorChange,
    decode_chunk,
    encode_anchor,
    encode_delta,
    inspect_chunk,
)
from anabranch.kernels.delta_dtypes import FORMS
from anabranch.kernels.delta_plan import ArraySource
from anabranch.schemas.delta_file import PREFIX, DeltaHeader, frame_bytes
from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.layout import Layout

ROOT = Path(__file__).resolve().parent.parent.parent
CHUNK_MUTANTS, FILE_MUTANTS = 90_000, 10_000
EXTRA_BYTES = 192 * 2**20  # allowed beyond what the process has after its kernels are compiled
SLOWEST_S = 2.0  # of processor time: how busy the machine is does not show


def test_a_hundred_thousand_mutants(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-I", __file__, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout)
    assert told["mutants"] == CHUNK_MUTANTS + FILE_MUTANTS
    assert told["file_errors"] == FILE_MUTANTS  # digests let nothing through
    assert told["chunk_errors"] > CHUNK_MUTANTS // 4  # the others decoded to something inside the layout
    assert told["slowest_s"] < SLOWEST_S


def _states(rng: np.random.Generator) -> tuple[Layout, dict[str, Any], dict[str, Any]]:
    layout = Layout.build(
        [("a", "bf16", (40, 50)), ("b", "bf16", (3,)), ("c", "f32", (200,)), ("d", "f8_e4m3", (500,)), ("e", "i64", (9,)),
         ("f", "f16", (700,)), ("huge", "bf16", (2**33,))]
    )  # fmt: skip
    base: dict[str, Any] = {}
    for spec in layout.tensors:
        if spec.name != "huge":
            form = FORMS[spec.dtype]
            weights = rng.normal(0, 0.02, spec.numel).astype(np.float32).view(np.uint32)
            base[spec.name] = (weights >> np.uint32(max(0, 32 - 8 * form.width_bytes))).astype(form.uint)
    new = {
        n: b + (rng.random(b.size) < d).astype(b.dtype)
        for (n, b), d in zip(base.items(), (0.03, 1, 0.5, 0.1, 1, 0.02), strict=True)
    }
    return layout, base, new


class _Base:
    """The small tensors of the state; of the huge one, what is asked for is refused as a reader of a short file would."""

    def __init__(self, layout: Layout, base: dict[str, Any]) -> None:
        small = Layout.build((t.name, t.dtype, t.shape) for t in layout.tensors if t.name in base)
        self._source = ArraySource(small, base)

    def read(self, name: str, start: int, stop: int) -> Any:
        if name == "huge":
            raise DeltaError("no such elements here")
        return self._source.read(name, start, stop)


def _mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(mutant) or 1)
        how = rng.randrange(7)
        if how == 0 and mutant:
            mutant[at] ^= 1 << rng.randrange(8)
        elif how == 1 and mutant:
            mutant[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif how == 2:
            del mutant[at : at + rng.randrange(1, 9)]
        elif how == 3:
            mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 4:
            mutant[at : at + 8] = b"\xff" * rng.randrange(1, 9)
        elif how == 5:
            mutant = mutant[:at]
        else:
            other = rng.choice(others)
            mutant[at:] = other[rng.randrange(len(other)) :]
    return bytes(mutant)


def _check(layout: Layout, changes: list[TensorChange]) -> None:
    for change in changes:
        spec = layout.by_name[change.name]
        if change.indices is None:
            assert 0 <= change.start <= change.start + change.bits.size <= spec.numel
        else:
            assert change.indices.size == change.bits.size
            assert change.indices.size == 0 or (change.indices[0] >= 0 and change.indices[-1] < spec.numel)


def _open(data: bytes) -> list[bytes]:
    """A delta file in memory, checked as a reader does."""
    from anabranch.transport.blob_store import blob_digest

    at = PREFIX.size + frame_bytes(data[: PREFIX.size])
    header = DeltaHeader.unpack(data[: PREFIX.size], data[PREFIX.size : at])
    chunks = []
    for number, chunk in enumerate(header.manifest.chunks):
        blob = data[at : at + chunk.size_bytes]
        if blob_digest(blob) != chunk.digest:
            raise DeltaError(f"chunk {number} does not have its digest")
        chunks.append(blob)
        at += chunk.size_bytes
    if at != len(data):
        raise DeltaError("the file goes on after its last chunk")
    return chunks


def main(root: Path) -> None:
    rng = random.Random(20260101)
    layout, base, new = _states(np.random.default_rng(0))
    small = Layout.build((t.name, t.dtype, t.shape) for t in layout.tensors if t.name in base)
    chunks = [*encode_delta(small, base, new).chunks, *encode_anchor(small, new).chunks]
    source = _Base(layout, base)
    for chunk in chunks:
        decode_chunk(layout, chunk, source)  # compiles what there is to compile
        inspect_chunk(layout, chunk)
    stored = [(root / "tests" / "golden" / f"{name}.abdelta").read_bytes() for name in ("delta", "anchor")]
    for data in stored:
        _open(data)
    with open("/proc/self/statm", "rb") as statm:
        size_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + EXTRA_BYTES, -1))

    told = {"mutants": 0, "chunk_errors": 0, "file_errors": 0, "slowest_s": 0.0}
    for i in range(CHUNK_MUTANTS + FILE_MUTANTS):
        started = time.process_time()
        told["mutants"] += 1
        if i < CHUNK_MUTANTS:
            mutant = _mutate(rng, rng.choice(chunks), chunks)
            try:
                _check(layout, decode_chunk(layout, mutant, source))
                inspect_chunk(layout, mutant)
            except DeltaError as error:
                assert str(error), "an error without words"  # noqa: PT017 - counted; a raise is allowed, not required
                told["chunk_errors"] += 1
        else:
            original = rng.choice(stored)
            mutant = _mutate(rng, original, stored)
            if mutant == original:
                mutant = original[:-1]
            try:
                _open(mutant)
            except (DeltaError, ManifestError):
                told["file_errors"] += 1
        told["slowest_s"] = max(told["slowest_s"], time.process_time() - started)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
