"""Headers whose digest is right, whatever they say: a named error each, or one that agrees with itself, in little memory.

The work is done in a process of its own whose memory is limited: what one byte of a file unpacks to, as JSON and as objects,
ends it if it is not bounded.
"""

from __future__ import annotations

import base64
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from anabranch.schemas.delta_file import MAGIC, PREFIX, DeltaHeader
from anabranch.schemas.errors import DeltaError, ManifestError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
MUTANTS = 10_000
MAX_TIMES = 24  # what reading a header may take, in sizes of its JSON: objects are that much larger than their text
NOISE_BYTES = 150_000
BYTES_PER_VALUE = 6
SLOWEST_S = 2.0  # of processor time: how busy the machine is does not show
UNITS = (
    b"[],", b"{},", b"[[]],", b"[0],", b'{"a":0},', b'"ab",', b"1.5,", b"1e9,", b"999,", b"-1,", b'["",[],[]],', b'["a","u8",[]],',
    b'{"digest":"","size_bytes":0},', b'{"digest":"0000000000000000000000000000000000000000000000000000000000000000","size_bytes":-1},',
    b'{"digest":"0000000000000000000000000000000000000000000000000000000000000000","size_bytes":0},', "\N{GRINNING FACE}".encode(), b"\\ud800", b"null,", b"        ",
)  # fmt: skip


def sealed(content: bytes, level: int = 3) -> bytes:
    """A header of `content` whose digest is right."""
    frame = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(content)
    start = MAGIC + len(frame).to_bytes(4, "little")
    return start + xxhash.xxh3_128_digest(start + frame) + frame


def content_of(header: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(header[PREFIX.size :])


def bombs(fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Headers that are right but for one place, which is full of what takes most memory: small ones, and some as large as a
    reader takes. What cannot be compressed makes room for them, as digests of chunks could."""
    noise = base64.b64encode(random.Random(0).randbytes(NOISE_BYTES)).decode()
    for unit in [*UNITS, *map(padded, UNITS)]:
        for where in ("changed", "layout", "stages", "run", "chunks", "manifest", "text"):
            for size in (2**16, 30 * NOISE_BYTES)[: 1 + (unit == padded(unit))]:
                filling = unit * (size // len(unit))
                if where == "text":
                    filling = b'"' + filling.replace(b'"', b"") + b'"'
                else:
                    filling = b"[" + filling.rstrip(b", ") + b"]"
                yield f"{where} {unit!r} {size}", filled(fields, noise, where, filling)
    keys = b",".join(b'"%x": %8d' % (n, n) for n in range(NOISE_BYTES * 30 // 18))
    for where in ("manifest", "changed", "layout", "run", "chunks"):
        yield f"keys of {where}", filled(fields, noise, where, b"{" + keys + b"}")


def filled(fields: dict[str, Any], noise: str, where: str, filling: bytes) -> bytes:
    hole = {**fields, "manifest": {**fields["manifest"], "codec" if where == "run" else "run": noise}}
    if where in ("run", "chunks"):
        hole["manifest"][where] = "HOLE"
    elif where == "text":
        hole["layout"] = [["HOLE", "u8", [1]]]
    else:
        hole[where] = "HOLE"
        if where == "manifest":
            hole["stages"] = noise
    before, after = json.dumps(hole).encode().split(b'"HOLE"')
    return before + filling + after


def padded(unit: bytes) -> bytes:
    """With so many blanks that a header full of it has just as many values as it may."""
    return unit.ljust(BYTES_PER_VALUE * sum(map(unit.count, (b"[", b"{", b",", b":"))))


def mutate(rng: random.Random, content: bytes) -> bytes:
    mutant = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(mutant) or 1)
        how = rng.randrange(6)
        if how == 0:
            mutant[at : at + 1] = rng.choice(
                (b"0", b"9", b"-", b"[", b"]", b"{", b'"', b",", b"e", b".", b"\\", b"\xff", b"null")
            )
        elif how == 1:
            del mutant[at : at + rng.randrange(1, 9)]
        elif how == 2:
            end = at + rng.randrange(1, 40)
            mutant[at:at] = mutant[at:end]
        elif how == 3:
            mutant[at:at] = rng.choice(
                (b"1e400", b"9" * 40, b"9" * 5000, b"[" * 2000, b"true", b"-1", b"\\ud800", b"\0", b"NaN")
            )
        elif how == 4:
            mutant[at : at + 1] = bytes([rng.randrange(256)])
        else:
            a, b = sorted(rng.randrange(len(mutant) or 1) for _ in range(2))
            mutant[at:at] = mutant[a : min(b, a + 200)]
    return bytes(mutant)


def other_value(rng: random.Random, fields: Any) -> Any:
    """`fields` with one value, anywhere in it, exchanged for another."""
    choices = [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**200,
        1.5,
        "",
        "x",
        "\ud800",
        "0" * 32,
        "0" * 64,
        [],
        [1],
        [[]],
        {},
        {"a": 1},
    ]
    if isinstance(fields, dict) and fields and rng.random() < 0.9:
        key = rng.choice(list(fields))
        if rng.random() < 0.05:
            return {k: v for k, v in fields.items() if k != key}
        return {**fields, key: other_value(rng, fields[key])}
    if isinstance(fields, list) and fields and rng.random() < 0.9:
        at = rng.randrange(len(fields))
        return [*fields[:at], other_value(rng, fields[at]), *fields[at + 1 :]]
    return rng.choice(choices)


def run(what: str, tmp_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-I", __file__, what, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2500:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_ten_thousand_mutants(tmp_path: Path) -> None:
    told = run("mutants", tmp_path)
    assert told["errors"] + told["taken"] == MUTANTS
    assert told["errors"] > MUTANTS // 2
    assert told["slowest_s"] < SLOWEST_S


def test_nothing_unpacks_to_much(tmp_path: Path) -> None:
    told = run("bombs", tmp_path)
    assert told["errors"] > 300
    assert told["slowest_s"] < SLOWEST_S


def main(what: str, root: Path) -> None:
    stored = [(root / "tests" / "golden" / f"{name}.abdelta").read_bytes() for name in ("delta", "anchor")]
    headers = [data[: PREFIX.size + int.from_bytes(data[8:12], "little")] for data in stored]
    contents = [content_of(header) for header in headers]
    for header in headers:
        DeltaHeader.unpack(header[: PREFIX.size], header[PREFIX.size :])
    rng = random.Random(20260102)
    told: dict[str, Any] = {"errors": 0, "taken": 0, "slowest_s": 0.0}
    made: Iterator[tuple[str, bytes]]
    if what == "bombs":
        made = bombs(json.loads(contents[0]))
    else:
        made = (
            (
                str(n),
                mutate(rng, rng.choice(contents))
                if n % 2
                else json.dumps(other_value(rng, json.loads(rng.choice(contents)))).encode(),
            )
            for n in range(MUTANTS)
        )
    for name, content in made:
        header = sealed(content)
        limit(MAX_TIMES * max(len(content), 2**18) + 2**23)
        started = time.process_time()
        try:
            taken = DeltaHeader.unpack(header[: PREFIX.size], header[PREFIX.size :])
            packed = taken.pack()
            assert DeltaHeader.unpack(packed[: PREFIX.size], packed[PREFIX.size :]) == taken
            told["taken"] += 1
        except (DeltaError, ManifestError) as error:
            assert len(str(error)) < 1000, (name, len(str(error)))  # noqa: PT017 - counted; a raise is allowed
            told["errors"] += 1
        except BaseException:
            print(name)
            raise
        finally:
            limit(None)
        told["slowest_s"] = max(told["slowest_s"], time.process_time() - started)
    print(json.dumps(told))


def limit(extra_bytes: int | None) -> None:
    """Of what this process may have beyond what it has."""
    size = -1
    if extra_bytes is not None:
        with open("/proc/self/statm", "rb") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, -1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
