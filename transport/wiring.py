"""From a configuration to connected clients.

Invariant: each call makes connections of its own (a client object belongs to one thread) and gives up after
`channel.connect_deadline_s` with an error that names the server, without its password.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis

from anabranch.schemas.config import RunConfig
from anabranch.schemas.keys import Keys
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.permits import Permits
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.stream import TrajectoryStream
from anabranch.transport.weight_channel import WeightChannel


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
    what = f"the Redis of region {region}"
    client = _connect(config, config.regions[region].url, what)
    return RedisStream(client, Keys(config.run.name), max_entry_bytes=config.stream.max_entry_bytes, what=what)


def _connect(config: RunConfig, url: str, what: str) -> redis.Redis:
    return connect(url, stream=config.stream, deadline_s=config.channel.connect_deadline_s, what=what)
