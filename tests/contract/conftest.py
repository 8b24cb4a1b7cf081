"""One suite, two implementations: a test that asks for `backend` runs over memory and over a real Valkey."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from anabranch.schemas.keys import Keys
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.permits import Permits
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.stream import TrajectoryStream
from tests.contract.s3_server import S3Server, s3_server
from tests.contract.weight_worlds import World


@dataclass
class Backend:
    """`stream()` opens another handle on the same stream, as another process would."""

    name: str
    stream: Callable[[], TrajectoryStream]
    put_raw: Callable[[dict[bytes, bytes]], str]
    dead_letters: Callable[[], list[dict[bytes, bytes]]]


@pytest.fixture(params=["memory", "redis"])
def backend(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Backend]:
    if request.param == "memory":
        store = MemoryStreamStore()
        yield Backend("memory", lambda: MemoryStream(store), store.add, lambda: store.dead_letters)
        return
    valkey = request.getfixturevalue("valkey")
    opened: list[RedisStream] = []

    def stream() -> RedisStream:
        opened.append(RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys))
        return opened[-1]

    client = request.getfixturevalue("client")
    yield Backend(
        "redis",
        stream,
        lambda fields: client.xadd(keys.trajectories, fields).decode(),
        lambda: [fields for _, fields in client.xrange(keys.dead_letters)],
    )
    for handle in opened:
        handle.close()


@pytest.fixture(params=["memory", "redis"])
def stream_maker(request: pytest.FixtureRequest, run_name: str) -> Callable[[], TrajectoryStream]:
    """A fresh, empty stream at every call, for property tests."""
    if request.param == "memory":
        return lambda: MemoryStream(MemoryStreamStore())
    client = request.getfixturevalue("client")
    number = itertools.count()
    return lambda: RedisStream(client, Keys(f"{run_name}.{next(number)}"))


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest, run_name: str) -> Callable[[], Permits]:
    """Fresh permits at every call."""
    if request.param == "memory":
        return MemoryPermits
    client = request.getfixturevalue("client")
    number = itertools.count()
    return lambda: RedisPermits(client, Keys(f"{run_name}.{next(number)}"))


@pytest.fixture(params=["memory", "memory, chunks outside", "redis", "redis, chunks outside"])
def world(request: pytest.FixtureRequest, keys: Keys) -> Iterator[World]:
    """A fresh, empty weight channel."""
    kind, _, outside = request.param.partition(", ")
    chunks = MemoryBlobStore()
    blobs = chunks if outside else None
    if kind == "memory":
        store = MemoryWeightStore(keys.run)
        held = chunks if outside else store.blobs

        def open_one(**more: int) -> MemoryWeightChannel:
            return MemoryWeightChannel(store, blobs, **more)

        yield World(keys.run, bool(outside), open_one, held.chunks.__setitem__, lambda: set(held.chunks))
        return
    valkey, client = request.getfixturevalue("valkey"), request.getfixturevalue("client")
    opened: list[RedisWeightChannel] = []

    def open_client(**more: int) -> RedisWeightChannel:
        there = connect(valkey.url, deadline_s=10, what="the test hub")
        opened.append(RedisWeightChannel(there, keys, blobs=blobs, **more))
        return opened[-1]

    prefix = keys.blob("")
    yield World(
        keys.run,
        bool(outside),
        open_client,
        chunks.chunks.__setitem__ if outside else lambda digest, payload: client.set(keys.blob(digest), payload),
        lambda: (
            set(chunks.chunks)
            if outside
            else {key.decode().removeprefix(prefix) for key in client.scan_iter(f"{prefix}*", count=1000)}
        ),
    )
    for channel in opened:
        channel.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTKEYID")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-of-the-store")
        yield server
