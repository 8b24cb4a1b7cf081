"""From a configuration to connected clients.

Invariant: each call makes connections of its own (a client object belongs to one thread) and gives up after
`channel.connect_deadline_s` with an error that names the server, without its password.
Held by tests/unit/transport/test_wiring.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import redis
import structlog

from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, ConfigError, StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.cached_blob_store import CachedBlobStore
from anabranch.transport.permits import Permits
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from anabranch.transport.redis_client import connect, open_client
from anabranch.transport.redis_dead_letters import RedisDeadLetters
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.stream import TrajectoryStream
from anabranch.transport.weight_channel import WeightChannel

PATIENCE_S = 1.0  # for one region, before the next is tried
FURTHER_REGION_S = 5.0  # how long a further region is waited for once one has answered


@dataclass(frozen=True, slots=True)
class Hub:
    """Everything on the hub, over one connection pool."""

    channel: WeightChannel
    permits: Permits
    runs: RunBoard
    evaluations: EvaluationBoard

    def close(self) -> None:
        self.channel.close()


def connect_hub(config: RunConfig) -> Hub:
    """Raises StreamUnavailableError (deadline) or ConfigError (credentials, blob store)."""
    blobs = _blob_store(config)
    client = _connect(config, config.hub.url, "the hub's Redis")
    keys = Keys(config.run.name)
    return Hub(
        channel=RedisWeightChannel(client, keys, blobs=blobs, what="the hub's Redis"),
        permits=RedisPermits(client, keys),
        runs=RedisRunBoard(client, keys),
        evaluations=RedisEvaluationBoard(client, keys),
    )


def connect_weights(config: RunConfig, region: str) -> WeightChannel:
    """The channel as producers of `region` read it: heads and manifests from `regions.REGION.weights_url`, or from the
    hub; chunks from there too, or from the object store, through the region's cache if it has one. Leases need
    `connect_hub`.

    Raises:
        StreamUnavailableError: no answer by the deadline. A region's cache that is away is done without.
        ConfigError: credentials or blob store.
    """
    section = config.regions[region]
    keys = Keys(config.run.name)
    blobs = _blob_store(config)
    what = "the hub's Redis" if section.weights_url is None else f"the weights replica of region {region}"
    client = _connect(config, section.weights_url or config.hub.url, what)
    if blobs is not None and config.channel.region_cache_bytes:
        name = f"the weight cache in {_region(region)}"
        cache = open_client(section.url, stream=config.stream, deadline_s=PATIENCE_S, what=name)
        blobs = CachedBlobStore(blobs, cache, keys, config.channel.region_cache_bytes, what=name)
    return RedisWeightChannel(client, keys, blobs=blobs, what=what)


def connect_region(config: RunConfig, region: str) -> TrajectoryStream:
    """Raises StreamUnavailableError (deadline) or ConfigError (credentials)."""
    return _stream(config, region, _connect(config, config.regions[region].url, _region(region)))


def connect_regions(config: RunConfig) -> dict[str, TrajectoryStream]:
    """Every region's stream. One region must answer; those that do not, or refuse us, are left to whoever reads them (a
    learner that restarts while a region is cut off goes on with the others).

    Raises:
        StreamUnavailableError: no region answered by the deadline; names each with its reason.
        ConfigError: every region refuses the credentials; or an unusable URL.
    """
    clients: dict[str, redis.Redis] = {}
    away: dict[str, AnabranchError] = {}
    started = time.monotonic()
    while True:
        for name in sorted(config.regions.keys() - clients.keys()):
            if isinstance(away.get(name), ConfigError):  # a person must mend that: asking again helps nobody
                continue
            try:
                clients[name] = connect(
                    config.regions[name].url, stream=config.stream, deadline_s=PATIENCE_S, what=_region(name)
                )
                away.pop(name, None)
            except (StreamUnavailableError, ConfigError) as error:
                away[name] = error
        waited_s = time.monotonic() - started
        refused = sum(isinstance(error, ConfigError) for error in away.values())
        if len(away) == refused or waited_s > (FURTHER_REGION_S if clients else config.channel.connect_deadline_s):
            break
    missing = {name: _open(config, name) for name in away}  # an unusable URL is an error here
    if not clients:
        kind = ConfigError if len(away) == refused else StreamUnavailableError
        raise kind("; ".join(str(error) for error in away.values()))
    for name, reason in away.items():
        log = structlog.get_logger().bind(region=name, error=str(reason))
        if isinstance(reason, ConfigError):
            log.error("region refuses us; going on without it")
        else:
            log.warning("region cannot be reached; going on without it")
    return {name: _stream(config, name, client) for name, client in (clients | missing).items()}


def connect_dead_letters(config: RunConfig, region: str) -> RedisDeadLetters:
    """Raises StreamUnavailableError (deadline) or ConfigError (credentials)."""
    client = _connect(config, config.regions[region].url, _region(region))
    return RedisDeadLetters(client, Keys(config.run.name), what=_region(region))


def _open(config: RunConfig, region: str) -> redis.Redis:
    url = config.regions[region].url
    return open_client(url, stream=config.stream, deadline_s=PATIENCE_S, what=_region(region))


def _stream(config: RunConfig, region: str, client: redis.Redis) -> RedisStream:
    return RedisStream(
        client,
        Keys(config.run.name),
        max_entry_bytes=config.stream.max_entry_bytes,
        max_dead_letters=config.stream.max_dead_letters,
        what=_region(region),
    )


def _blob_store(config: RunConfig) -> BlobStore | None:
    if config.channel.blobs == "redis":
        return None
    from anabranch.transport.object_blob_store import open_blob_store  # loads obstore, for those who need it

    return open_blob_store(config.channel, config.run.name)


def _region(name: str) -> str:
    return f"the Redis of region {name}"


def _connect(config: RunConfig, url: str, what: str) -> redis.Redis:
    return connect(url, stream=config.stream, deadline_s=config.channel.connect_deadline_s, what=what)
