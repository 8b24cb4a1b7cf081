from __future__ import annotations

import time

import pytest

from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError
from anabranch.transport.retry import backoff_s, retry_until, wait_until


def failing(times: int, error: type[Exception] = StreamUnavailableError):
    calls = []

    def action() -> str:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise error("away")
        return "done"

    return action, calls


def test_an_action_is_repeated_until_it_works():
    action, calls = failing(3, BackpressureError)
    assert retry_until(action, deadline_s=5, what="x", base_s=0.001) == "done"
    assert len(calls) == 4


def test_giving_up_names_what_was_waited_for_and_why():
    action, calls = failing(10**6)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"0\.1 s waiting for the stream of region eu; away") as caught:
        retry_until(action, deadline_s=0.1, what="the stream of region eu", base_s=0.01)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, StreamUnavailableError)
    assert len(calls) > 1


def test_other_errors_pass_at_once():
    action, calls = failing(1, KeyError)
    with pytest.raises(KeyError):
        retry_until(action, deadline_s=5, what="x")
    assert len(calls) == 1


def test_a_stop_ends_the_wait_with_the_last_error():
    action, calls = failing(10**6)
    with pytest.raises(StreamUnavailableError):
        retry_until(action, deadline_s=60, what="x", base_s=0.001, should_stop=lambda: len(calls) >= 3)
    assert len(calls) == 3


def test_backoff_doubles_up_to_its_cap_and_is_jittered_by_at_most_half():
    for attempt in (0, 1, 5, 1000):
        full = min(2.0, 0.05 * 2.0 ** min(attempt, 60))
        waits = {backoff_s(attempt) for _ in range(50)}
        assert all(full / 2 <= w <= full for w in waits)
        assert len(waits) > 1


def test_wait_until_returns_the_value_or_names_the_wait():
    values = iter([None, 0, "ready"])
    assert wait_until(lambda: next(values), deadline_s=5, what="x", poll_s=0.001) == "ready"
    with pytest.raises(DeadlineError, match="waiting for a head; is the learner running"):
        wait_until(lambda: None, deadline_s=0.05, what="a head", hint="is the learner running?")
