"""A hub that takes no more data: no permit is handed out and none is lost, and work goes on by itself when there is room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis

from anabranch.producers.hub_link import HubLink
from anabranch.schemas.errors import BackpressureError
from anabranch.schemas.keys import Keys
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from anabranch.transport.redis_permits import RedisPermits
from tests.contract.backends import SERVERS
from tests.contract.permit_worlds import LONG_MS, opened, take

V0 = PolicyVersion(1, 0)
Full = Callable[[bool], None]


@pytest.fixture(params=SERVERS)
def hub(request: pytest.FixtureRequest, client_of: Callable[[str], redis.Redis]) -> Iterator[redis.Redis]:
    client = client_of(request.param)
    yield client
    client.config_set("maxmemory", 0)


def test_what_frees_and_what_only_moves_goes_on(hub: redis.Redis, keys: Keys) -> None:
    permits = opened(lambda: RedisPermits(hub, keys))
    assert take(permits, 5) == [0, 1, 2, 3, 4]
    hub.config_set("maxmemory", 1)
    before = permits.state()
    with pytest.raises(BackpressureError, match="takes no more"):
        take(permits, 1)
    assert permits.state() == before
    assert permits.renew("p", [0, 1, 2, 3, 4, 9], lease_ms=LONG_MS) == [9]
    permits.settle([0])
    permits.give_back([1])
    assert permits.give_up("p", [2], max_attempts=1) == [2]
    assert permits.give_up("p", [3], max_attempts=9) == []
    assert permits.surrender("p") == 1
    permits.advance(1, epoch=1, abandoned={2})
    hub.config_set("maxmemory", 0)
    assert take(permits, 4) == [1, 3, 4, 5]


def test_a_producer_goes_on_by_itself_when_there_is_room(hub: redis.Redis, keys: Keys) -> None:
    permits, runs, evaluations = RedisPermits(hub, keys), RedisRunBoard(hub, keys), RedisEvaluationBoard(hub, keys)
    opened(lambda: permits)
    status = ProducerStatus(updated_ms=1, region="east", pid=1, state="idle", policy="e1.v0")
    link = HubLink(permits, runs, evaluations, producer="p", lease_ms=LONG_MS, poll_ms=5, status=lambda: status)
    hub.config_set("maxmemory", 1)
    link.want(3, V0)
    link.start()
    try:
        end = time.monotonic() + 10
        while "maxmemory" not in link.error and time.monotonic() < end:
            time.sleep(0.01)
        assert "maxmemory" in link.error
        assert link.take(9) == []
        hub.config_set("maxmemory", 0)
        end = time.monotonic() + 5  # what is promised
        while not (got := link.take(9)) and time.monotonic() < end:
            time.sleep(0.01)
        assert [p.group_index for p in got] == [0, 1, 2]
    finally:
        link.close()
