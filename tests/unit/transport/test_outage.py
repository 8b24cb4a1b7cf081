from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from anabranch.schemas.errors import BackpressureError, ConfigError, StreamUnavailableError
from anabranch.transport.outage import Outage


class Store:
    """Each call takes `seconds` by its clock, and fails as it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.outage = Outage(clock=lambda: self.now)

    def put(self, error: Exception | None = None, *, seconds: float = 1.0) -> list[dict]:
        """What was logged."""

        def call() -> str:
            self.now += seconds
            if error is not None:
                raise error
            return "digest"

        with capture_logs() as logged:
            if error is None:
                assert self.outage.watch(call) == "digest"
            else:
                with pytest.raises(type(error)) as caught:
                    self.outage.watch(call)
                assert caught.value is error
        return logged


AWAY, FULL = StreamUnavailableError("the store is away"), BackpressureError("the store is full")


@pytest.mark.parametrize("error", [AWAY, FULL])
def test_an_outage_is_told_once_after_five_seconds_and_once_when_it_is_over(error):
    store = Store()
    assert [store.put(error) for _ in range(4)] == [[]] * 4
    (line,) = store.put(error)
    assert line["log_level"] == "warning"
    assert line["event"].startswith("chunks cannot be stored")
    assert (line["error"], line["for_s"]) == (str(error), 5.0)
    assert [store.put(error) for _ in range(60)] == [[]] * 60
    (line,) = store.put()
    assert (line["log_level"], line["event"], line["after_s"]) == ("info", "chunks can be stored again", 66.0)
    assert store.put() == []


def test_each_outage_is_told():
    store = Store()
    for _ in range(2):
        assert len(store.put(AWAY, seconds=20)) == 1  # one call that was silent for so long
        assert len(store.put()) == 1


def test_what_fails_now_and_then_is_no_outage():
    store = Store()
    for _ in range(10):
        assert store.put(AWAY, seconds=4) == []
        assert store.put(seconds=4) == []


def test_slow_is_not_away_and_a_mistake_is_no_outage():
    store = Store()
    assert store.put(seconds=100) == []
    assert store.put(ConfigError("credentials"), seconds=100) == []
    assert store.put() == []
