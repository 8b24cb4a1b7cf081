"""One suite, several implementations: a test that asks for `backend` runs over memory, over a real Valkey and over the
Redis 7.0 of Debian (where there is one: see tests/servers.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import redis

from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.permits import Permits
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests import servers
from tests.contract.backends import BACKENDS, Backend, memory_backend, redis_backend
from tests.contract.s3_server import S3Server, s3_server
from tests.contract.weight_worlds import World


@pytest.fixture(scope="session")
def debian_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """As `valkey`."""
    folder = tmp_path_factory.mktemp("redis 7")
    with EmbeddedValkey(folder / "data", fsync="everysec", program=servers.debian_redis(folder)) as server:
        yield server


@pytest.fixture
def server_named(request: pytest.FixtureRequest) -> Callable[[str], EmbeddedValkey]:
    """The running server of one of SERVERS, started when it is first asked for."""
    return lambda name: request.getfixturevalue({"valkey": "valkey", "redis 7.0": "debian_redis"}[name])


@pytest.fixture
def client_of(server_named: Callable[[str], EmbeddedValkey]) -> Iterator[Callable[[str], redis.Redis]]:
    """Another client of one of SERVERS at every call."""
    opened: list[redis.Redis] = []

    def open_one(name: str) -> redis.Redis:
        opened.append(connect(server_named(name).url, deadline_s=10, what=f"the test {name}"))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, keys: Keys, client_of: Callable[[str], redis.Redis]) -> Iterator[Backend]:
    if request.param == "memory":
        yield memory_backend()
        return
    made = redis_backend(request.param, lambda: client_of(request.param), keys)
    yield made
    made.set_full(False)


@pytest.fixture(params=BACKENDS)
def stream_maker(
    request: pytest.FixtureRequest, run_name: str, client_of: Callable[[str], redis.Redis]
) -> Callable[[], Backend]:
    """A fresh, empty stream at every call, for property tests."""
    if request.param == "memory":
        return memory_backend
    client, number = client_of(request.param), itertools.count()
    return lambda: redis_backend(request.param, lambda: client, Keys(f"{run_name}.{next(number)}"))


@pytest.fixture(params=BACKENDS)
def make(
    request: pytest.FixtureRequest, run_name: str, client_of: Callable[[str], redis.Redis]
) -> Callable[[], Permits]:
    """Fresh permits at every call."""
    if request.param == "memory":
        return MemoryPermits
    client, number = client_of(request.param), itertools.count()
    return lambda: RedisPermits(client, Keys(f"{run_name}.{next(number)}"))


@pytest.fixture(params=[f"{name}{chunks}" for name in BACKENDS for chunks in ("", ", chunks outside")])
def world(request: pytest.FixtureRequest, keys: Keys, client_of: Callable[[str], redis.Redis]) -> Iterator[World]:
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
    client = client_of(kind)

    def open_client(**more: int) -> RedisWeightChannel:
        return RedisWeightChannel(client_of(kind), keys, blobs=blobs, **more)

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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTKEYID")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-of-the-store")
        yield server
