"""A reader over real servers of which one refuses it: a changed password, a user without rights, keys of another type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from anabranch.consumers.reader import Reader
from anabranch.consumers.region_reader import REFUSED_LAST_S, RegionState
from anabranch.schemas.config import StreamSection
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry
from tests.readers import indices, until, wait
from tests.streams import put

pytestmark = pytest.mark.process
CONFIG = StreamSection(block_ms=20, socket_timeout_ms=1000)


class Site:
    """Two regions, `near` and `far`, and a reader over them; `far` can be spoilt."""

    def __init__(self, near: EmbeddedValkey, far: EmbeddedValkey, keys: Keys) -> None:
        self.keys, self.far = keys, far
        self.admin = connect(far.url, deadline_s=10, what="the far Valkey")
        self.streams = {
            name: RedisStream(
                connect(server.url, stream=CONFIG, deadline_s=10, what=f"the {name} Valkey"),
                keys,
                what=f"the {name} Valkey",
            )
            for name, server in (("near", near), ("far", far))
        }
        self.now_s = 0.0
        self.reader = Reader(
            self.streams,
            run=keys.run,
            group=LEARNER_GROUP,
            consumer="learner-0",
            config=CONFIG,
            clock=lambda: self.now_s,
        )

    def close(self) -> None:
        self.reader.close()
        for stream in self.streams.values():
            stream.close()
        self.admin.close()

    def arrive(self, region: str, index: int) -> None:
        put(self.streams[region], entry(index, run=self.keys.run))
        assert indices(until(self.reader, lambda polled: polled.arrivals)) == [index]

    def refused_in_time(self) -> bool:
        """A dropped connection is a region that is away, until it is asked again."""
        self.now_s += 0.1
        return bool(self.reader.refusing())

    def drop_connections(self) -> None:
        self.admin.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture
def site(valkey: EmbeddedValkey, tmp_path: Path, keys: Keys) -> Iterator[Site]:
    with EmbeddedValkey(tmp_path / "far", fsync="everysec") as far:
        made = Site(valkey, far, keys)
        yield made
        made.close()


def new_password(site: Site) -> Callable[[], object]:
    site.admin.config_set("requirepass", "another")
    site.drop_connections()
    return lambda: site.admin.config_set("requirepass", site.far.password)


def no_rights(site: Site) -> Callable[[], object]:
    site.admin.execute_command("ACL", "SETUSER", "default", "-xreadgroup")
    return lambda: site.admin.execute_command("ACL", "SETUSER", "default", "+xreadgroup")


def another_type(site: Site) -> Callable[[], object]:
    site.admin.rename(site.keys.trajectories, "kept")
    site.admin.set(site.keys.trajectories, "nonsense")
    return lambda: site.admin.rename("kept", site.keys.trajectories)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (new_password, "refused the credentials"),
        (no_rights, "refused a command to this user"),
        (another_type, "WRONGTYPE"),
    ],
)
def test_the_other_region_goes_on_until_somebody_mends_it(
    site: Site, spoil: Callable[[Site], Callable[[], object]], why: str
) -> None:
    site.arrive("near", 0)
    site.arrive("far", 1)
    mend = spoil(site)
    wait(site.refused_in_time, "the refusal")
    health = site.reader.health()["far"]
    assert (health.state, list(site.reader.refusing())) == (RegionState.REFUSING, ["far"])
    assert why in health.why
    assert site.far.password not in health.why
    site.arrive("near", 2)
    mend()
    site.now_s += REFUSED_LAST_S
    wait(lambda: not site.reader.refusing(), "the region to be read again")
    site.arrive("far", 3)


@pytest.mark.parametrize("book", ["ledger", "open_entries", "open_ids"])
def test_what_cannot_be_booked_is_not_acknowledged_either(site: Site, book: str) -> None:
    """However often it is tried: else the books would never be even again."""
    put(site.streams["far"], *(entry(index, run=site.keys.run) for index in range(3)))
    arrivals = until(site.reader, lambda polled: len(polled.arrivals) == 3).arrivals
    key = getattr(site.keys, book)
    site.admin.rename(key, "kept")
    site.admin.set(key, "nonsense")
    site.reader.settle("far", [(arrival.entry_id, "trained") for arrival in arrivals])
    wait(site.reader.refusing, "the refusal")
    for _ in range(3):
        with pytest.raises(AnabranchError, match="WRONGTYPE"):
            site.streams["far"].settle(LEARNER_GROUP, [(arrivals[0].entry_id, "trained")])
    site.admin.rename("kept", key)
    site.now_s += REFUSED_LAST_S
    wait(lambda: not site.reader.unsettled(), "the acknowledgement")
    counts = site.streams["far"].ledger(LEARNER_GROUP)
    assert (counts.fates, counts.pending, counts.balanced) == ({"trained": 3}, 0, True)
    assert site.streams["far"].progress("p").lowest_open is None


def test_a_count_that_is_no_number_keeps_what_would_raise_it_from_being_acknowledged(site: Site) -> None:
    put(site.streams["far"], entry(0, run=site.keys.run))
    (arrival,) = until(site.reader, lambda polled: polled.arrivals).arrivals
    site.admin.hset(site.keys.ledger, "trained", "many")
    site.reader.settle("far", [(arrival.entry_id, "trained")])
    wait(site.reader.refusing, "the refusal")
    site.admin.hdel(site.keys.ledger, "trained")
    site.now_s += REFUSED_LAST_S
    wait(lambda: not site.reader.unsettled(), "the acknowledgement")
    assert site.streams["far"].ledger(LEARNER_GROUP).fates == {"trained": 1}


def test_an_unreadable_entry_waits_for_its_letter_and_its_count(site: Site) -> None:
    site.arrive("far", 0)
    site.admin.rename(site.keys.ledger, "kept")
    site.admin.set(site.keys.ledger, "nonsense")
    site.admin.xadd(site.keys.trajectories, {"nonsense": "1"})
    wait(site.reader.refusing, "the refusal")
    site.admin.rename("kept", site.keys.ledger)
    site.now_s += REFUSED_LAST_S
    (dead,) = until(site.reader, lambda polled: polled.dead).dead
    assert "SchemaVersionError" in dead.cause
    counts = site.streams["far"].ledger(LEARNER_GROUP)
    assert (counts.fates, counts.foreign, counts.pending) == ({"dropped:dead_letter": 1}, 1, 1)
    assert site.admin.xlen(site.keys.dead_letters) == 1


def test_regions_that_all_refuse_end_the_reader(site: Site, client: redis.Redis) -> None:
    for key_owner in (site.admin, client):
        key_owner.set(site.keys.trajectories, "nonsense")
    with pytest.raises(AnabranchError, match=r"far Valkey.*WRONGTYPE.*near Valkey.*WRONGTYPE"):
        until(site.reader, lambda polled: False)
    client.delete(site.keys.trajectories)
