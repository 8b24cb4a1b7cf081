"""From a configuration to connected clients.

Invariant: each call makes connections of its own (a client object belongs to one thread) and gives up after
`channel.connect_deadline_s` with an error that names the server, without its password.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import redis
import structlog

from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.permits import Permits
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from anabranch.transport.redis_client import connect, open_client
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
    """Raises StreamUnavailableError (deadline) or ConfigError (credentials)."""
    client = _connect(config, config.hub.url, "the hub's Redis")
    keys = Keys(config.run.name)
    return Hub(
        channel=RedisWeightChannel(client, keys),
        permits=RedisPermits(client, keys),
        runs=RedisRunBoard(client, keys),
        evaluations=RedisEvaluationBoard(client, keys),
    )


def connect_region(config: RunConfig, region: str) -> TrajectoryStream:
    """Raises StreamUnavailableError (deadline) or ConfigError (credentials)."""
    what = _region(region)
    client = _connect(config, config.regions[region].url, what)
    return RedisStream(client, Keys(config.run.name), max_entry_bytes=config.stream.max_entry_bytes, what=what)


def connect_regions(config: RunConfig) -> dict[str, TrajectoryStream]:
    """Every region's stream. One region must answer; those that do not are left to whoever reads them (a learner that
    restarts while a region is cut off goes on with the others).

    Raises:
        StreamUnavailableError: no region answered by the deadline; names each with its reason.
        ConfigError: a region refuses the credentials.
    """
    clients: dict[str, redis.Redis] = {}
    away: dict[str, StreamUnavailableError] = {}
    started = time.monotonic()
    while len(clients) < len(config.regions):
        for name in sorted(config.regions.keys() - clients.keys()):
            try:
                clients[name] = connect(
                    config.regions[name].url, stream=config.stream, deadline_s=PATIENCE_S, what=_region(name)
                )
                away.pop(name, None)
            except StreamUnavailableError as error:
                away[name] = error
        waited_s = time.monotonic() - started
        if waited_s > (FURTHER_REGION_S if clients else config.channel.connect_deadline_s):
            break
    if not clients:
        raise StreamUnavailableError("; ".join(str(error) for error in away.values()))
    for name, reason in away.items():
        structlog.get_logger().warning("region cannot be reached; going on without it", region=name, error=str(reason))
        clients[name] = open_client(
            config.regions[name].url, stream=config.stream, deadline_s=PATIENCE_S, what=_region(name)
        )
    return {
        name: RedisStream(
            client, Keys(config.run.name), max_entry_bytes=config.stream.max_entry_bytes, what=_region(name)
        )
        for name, client in clients.items()
    }


def _region(name: str) -> str:
    return f"the Redis of region {name}"


def _connect(config: RunConfig, url: str, what: str) -> redis.Redis:
    return connect(url, stream=config.stream, deadline_s=config.channel.connect_deadline_s, what=what)
