"""`anabranch bench delivery`: bytes and rollouts per second through a region's stream and its reader.

Invariant: every figure is a median of rounds in which ours and its peers took turns on one server, with payloads of the same
size or the same rollouts; a ratio is the median of the rounds' ratios. Held by tests/process/test_bench_delivery.py.

`measure_bytes` compares with redis-benchmark doing the same commands over one connection: XADD of an entry with as many fields
and as many per round trip, XREADGROUP of as many per read. It is spared the Lua script, the sequence numbers, the checksums,
the decoding, the acknowledgements and the trimming, which are all in our time. The ratio that counts is of writing and reading
at the same time, a process each, as many bytes each way on a stream that holds what is to be read: what goes through stream and
reader. Writing alone and reading alone are told too, and what SET and GET of such values give over 50 connections.
`measure_rollouts` compares with one message per rollout, written by one process and then read by it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

from anabranch.deploy.delivery_load import Ours, WriterProcess, make_groups, payload_of, per_read
from anabranch.deploy.delivery_peers import Dumps, Loads, OneByOne, RedisBenchmark, messages
from anabranch.deploy.delivery_rows import BytesRow, Persistence, RolloutsRow
from anabranch.deploy.summary import machine_facts
from anabranch.schemas.trajectory import encode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect

SIZES = (64 * 2**10, 256 * 2**10, 2**20)
SHAPES = ((8, 64), (8, 512), (16, 64), (16, 512))  # rollouts of a group, tokens of a completion
READ_BYTES = 4 * 2**20
Tell = Callable[[str], None]


def machine() -> dict[str, Any]:
    """What the figures depend on: the machine, the server, redis-benchmark, and whether hiredis parses replies."""
    with fresh_server("none") as server:
        facts = server.near.info("server")
    name = "valkey" if "valkey_version" in facts else "redis"
    return machine_facts() | {
        "server": f"{name} {facts[f'{name}_version']}",
        "redis_benchmark": RedisBenchmark.version(),
        "hiredis": find_spec("hiredis") is not None,
    }


@dataclass(frozen=True, slots=True)
class Server:
    """Two clients of one server, and its address (with a password)."""

    url: str
    near: redis.Redis
    far: redis.Redis


@contextmanager
def fresh_server(persistence: Persistence) -> Iterator[Server]:
    """A server of our own, gone afterwards with its data; two clients."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey(Path(folder), fsync="everysec") as valkey:
        near, far = (connect(valkey.url, deadline_s=10.0, what="the benchmark's server") for _ in range(2))
        near.config_set("auto-aof-rewrite-percentage", 0)  # a rewrite in the middle would be somebody's bad luck
        if persistence == "none":
            near.config_set("appendonly", "no")
        yield Server(valkey.url, near, far)
        near.close()
        far.close()


def measure_bytes(
    *,
    sizes: Sequence[int] = SIZES,
    persistence: Sequence[Persistence] = ("none", "everysec"),
    megabytes: int = 128,
    rounds: int = 5,
    read_bytes: int = READ_BYTES,
    tell: Tell = lambda _: None,
) -> Iterator[BytesRow]:
    """A row for every way of keeping data and every entry size, as they are measured; `megabytes` per pass."""
    for keep in persistence:
        for size in sizes:
            payload = payload_of(size)
            entries = max(2, megabytes * 10**6 // len(payload))
            with fresh_server(keep) as server, WriterProcess(server.url, payload) as writer:
                found = []
                for number in range(rounds + 1):
                    tell(f"entries of {size // 1024} KB, persistence {keep}: round {number} of {rounds}")
                    found.append(_ours_round(server, writer, payload, entries, read_bytes))
                    found[-1].update(_peer_round(server, payload, entries, read_bytes, found[-1]))
                yield _bytes_row(keep, payload, entries, found[1:], read_bytes)  # the first warms up


def _ours_round(
    server: Server, writer: WriterProcess, payload: bytes, entries: int, read_bytes: int
) -> dict[str, float]:
    server.near.flushall()
    ours = Ours(server.near, server.far, read_bytes=read_bytes)
    written = ours.write([payload] * entries)
    read = ours.read(entries, len(payload))
    ours.write([payload] * entries)
    writer.start(entries, ours.next_seq)
    read_too = ours.read(entries, len(payload))
    written_too = writer.done()
    return {
        "write": written.mb_s, "read": read.mb_s, "through": min(read_too.mb_s, written_too.mb_s),
        "reader_cpu": 1e3 * read.cpu_s / (read.payload_bytes / 1e6),
        "writer_cpu": 1e3 * written.cpu_s / (written.payload_bytes / 1e6),
    }  # fmt: skip


def _peer_round(
    server: Server, payload: bytes, entries: int, read_bytes: int, ours: Mapping[str, float]
) -> dict[str, float]:
    server.near.flushall()
    if not RedisBenchmark.is_here():
        return {}
    peer, size = RedisBenchmark(server.near), len(payload)
    pipeline, count = Ours.per_append(size), per_read(read_bytes, size)
    whole = entries // pipeline * pipeline or pipeline
    found = {
        "their_write": peer.write(size, whole, pipeline=pipeline),
        "their_read": peer.read(size, whole, count=count),
    }
    found["their_through"] = peer.together(size, whole, pipeline=pipeline, count=count)
    server.near.flushall()
    found["set"], found["get"] = peer.set_and_get(size, entries)
    return found | {f"{way}_ratio": ours[way] / found[f"their_{way}"] for way in ("write", "read", "through")}


def _bytes_row(
    keep: Persistence, payload: bytes, entries: int, rounds: Sequence[Mapping[str, float]], read_bytes: int
) -> BytesRow:
    def median(name: str) -> float:
        return _rounded(statistics.median(found[name] for found in rounds))

    def peer(name: str) -> float | None:
        return median(name) if name in rounds[0] else None

    return BytesRow(
        keep, len(payload), entries, len(rounds), Ours.per_append(len(payload)), per_read(read_bytes, len(payload)),
        write_mb_s=median("write"), read_mb_s=median("read"), through_mb_s=median("through"),
        reader_cpu_ms_per_mb=median("reader_cpu"), writer_cpu_ms_per_mb=median("writer_cpu"),
        benchmark_write_mb_s=peer("their_write"), benchmark_read_mb_s=peer("their_read"), benchmark_through_mb_s=peer("their_through"),
        write_ratio=peer("write_ratio"), read_ratio=peer("read_ratio"), through_ratio=peer("through_ratio"),
        set_mb_s=peer("set"), get_mb_s=peer("get"),
    )  # fmt: skip


def measure_rollouts(
    formats: Mapping[str, tuple[Dumps, Loads]],
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rollouts: int = 2048,
    rounds: int = 5,
    tell: Tell = lambda _: None,
) -> Iterator[RolloutsRow]:
    """Ours and then each of `formats` (name -> how a rollout is made bytes, and read again), for every shape; at least
    `rollouts` per pass."""
    for size, tokens in shapes:
        groups = make_groups(-(-rollouts // size), rollouts=size, tokens=tokens)
        plain = messages(groups)
        found: dict[str, list[dict[str, float]]] = {"ours": [], **{name: [] for name in formats}}
        with fresh_server("none") as server:
            near, far = server.near, server.far
            for number in range(rounds + 1):
                tell(f"groups of {size} rollouts of {tokens} tokens: round {number} of {rounds}")
                near.flushall()
                ours = Ours(near, far, read_bytes=READ_BYTES)
                found["ours"].append(_ours(ours, groups, len(plain)))
                for name, (dumps, loads) in formats.items():
                    near.flushall()
                    peer = OneByOne(near, far, dumps, loads)
                    found[name].append(_rates(peer.write(plain), peer.read(len(plain)), len(plain)))
        for name, passes in found.items():
            yield _rollouts_row(name, size, tokens, len(plain), passes[1:], found["ours"][1:])


def _ours(ours: Ours, groups: Sequence[Any], rollouts: int) -> dict[str, float]:
    size = len(encode_group(groups[0]))
    return _rates(ours.write_groups(groups, size), ours.read(len(groups), size, rollout_by_rollout=True), rollouts)


def _rates(written: Any, read: Any, rollouts: int) -> dict[str, float]:
    return {
        "write": rollouts / written.seconds, "read": rollouts / read.seconds,
        "both": rollouts / (written.seconds + read.seconds), "bytes": read.payload_bytes / rollouts,
        "reader_cpu": 1e6 * read.cpu_s / rollouts,
    }  # fmt: skip


def _rollouts_row(
    name: str,
    size: int,
    tokens: int,
    rollouts: int,
    passes: Sequence[dict[str, float]],
    ours: Sequence[dict[str, float]],
) -> RolloutsRow:
    def median(values: Iterable[float]) -> float:
        return _rounded(statistics.median(values))

    of = {key: median(found[key] for found in passes) for key in passes[0]}
    ratio = median(mine["both"] / found["both"] for mine, found in zip(ours, passes, strict=True))
    return RolloutsRow(
        name, size, tokens, rollouts, len(passes), round(of["bytes"]), of["write"], of["read"], of["both"],
        of["reader_cpu"], None if name == "ours" else ratio,
    )  # fmt: skip


def _rounded(value: float) -> float:
    return round(value) if value >= 1_000 else float(f"{value:.3g}")
