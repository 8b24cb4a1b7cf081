"""Leases: renewed in time, moved back at once when older versions are needed, given back at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.versions import PolicyVersion


class Hub:
    def __init__(self) -> None:
        self.calls: list[tuple[str, PolicyVersion]] = []
        self.released: list[str] = []
        self.away = False
        self.called = threading.Condition()

    def lease(self, holder: str, policy: PolicyVersion, *, ttl_ms: int) -> None:
        with self.called:
            self.called.notify_all()
            if self.away:
                raise StreamUnavailableError("gone")
            self.calls.append((holder, policy))

    def head(self) -> PolicyVersion | None:
        if self.away:
            raise StreamUnavailableError("gone")
        return PolicyVersion(1, 7)

    def release(self, holder: str) -> None:
        self.released.append(holder)

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.called:
            assert self.called.wait_for(ready, 10)


def keeper(hub: Hub, lease_ms: int = 60_000) -> LeaseKeeper:
    made = LeaseKeeper(hub, "p", lease_ms=lease_ms)
    made.start()
    return made


def test_the_first_lease_is_waited_for_and_given_back_at_the_end() -> None:
    hub = Hub()
    leases = keeper(hub)
    leases.protect(PolicyVersion(1, 5), wait_s=10)
    assert hub.calls == [("p", PolicyVersion(1, 5))]
    leases.close()
    assert hub.released == ["p"]


def test_an_older_version_is_told_at_once_and_a_newer_one_in_its_time() -> None:
    hub = Hub()
    leases = keeper(hub)
    leases.protect(PolicyVersion(1, 5), wait_s=10)
    leases.protect(PolicyVersion(1, 9))
    leases.protect(PolicyVersion(1, 3), wait_s=10)
    assert [policy for _, policy in hub.calls] == [PolicyVersion(1, 5), PolicyVersion(1, 3)]
    leases.close()


def test_it_is_renewed_with_what_is_needed_by_then() -> None:
    hub = Hub()
    leases = keeper(hub, lease_ms=60)
    leases.protect(PolicyVersion(1, 5), wait_s=10)
    leases.protect(PolicyVersion(1, 9))
    hub.wait(lambda: ("p", PolicyVersion(1, 9)) in hub.calls)
    leases.close()


def test_a_hub_that_is_away_holds_nobody_up_and_is_told_when_it_is_back() -> None:
    hub = Hub()
    hub.away = True
    leases = keeper(hub, lease_ms=60)
    leases.protect(PolicyVersion(1, 5), wait_s=0.05)
    hub.wait(lambda: "gone" in leases.error)
    leases.protect(PolicyVersion(1, 5), wait_s=600)  # known to be away: not waited for
    hub.away = False
    hub.wait(lambda: bool(hub.calls))
    assert hub.calls[0] == ("p", PolicyVersion(1, 5))
    leases.close()
    assert leases.error == ""


def test_without_a_version_nothing_is_leased() -> None:
    hub = Hub()
    keeper(hub).close()
    assert (hub.calls, hub.released) == ([], [])


def test_what_is_older_is_told_and_reported_once() -> None:
    hub = Hub()
    leases = keeper(hub)
    assert leases.protect(PolicyVersion(1, 5), wait_s=10)
    assert not leases.protect(PolicyVersion(1, 9), wait_s=10)
    assert leases.protect(PolicyVersion(1, 3), wait_s=10)
    leases.close()


def test_the_hubs_head_is_asked_for_without_a_lease() -> None:
    hub = Hub()
    leases = keeper(hub)
    assert leases.hub_head(wait_s=10) == PolicyVersion(1, 7)
    hub.away = True
    assert leases.hub_head(wait_s=10) is None
    leases.close()
    assert leases.hub_head(wait_s=10) is None, "a thread that has ended answers nothing and is not waited for"
    assert hub.calls == []


def test_a_mistake_in_the_thread_shows_and_does_not_end_it() -> None:
    hub = Hub()
    leases = keeper(hub, lease_ms=60)
    hub.lease, works = lambda *_, **__: {}["a bug"], hub.lease  # type: ignore[assignment,func-returns-value]
    assert not leases.protect(PolicyVersion(1, 5), wait_s=10), "nor is it waited for"
    assert "a bug" in leases.error
    hub.lease = works  # type: ignore[method-assign]
    hub.wait(lambda: bool(hub.calls))
    leases.close()
    assert leases.error == ""
