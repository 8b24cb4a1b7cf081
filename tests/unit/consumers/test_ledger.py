"""The ledger of a run, per region; a region that cannot be asked is named."""

from __future__ import annotations

import socket

import pytest

from anabranch.consumers.ledger import read_ledger
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.stream import LedgerCounts
from anabranch.transport.wiring import connect_region
from tests.groups import entry
from tests.streams import put


@pytest.fixture
def config(valkey: EmbeddedValkey, run_name: str) -> RunConfig:
    """Two regions, in two databases of one server."""
    urls = {name: valkey.url.removesuffix("/0") + f"/{db}" for name, db in (("east", 0), ("west", 1))}
    return load_config(
        overrides=[f"run.name={run_name}", *(f"regions.{name}.url={url}" for name, url in urls.items())],
    )


def produce(config: RunConfig) -> None:
    """East: 5 produced, 2 trained, 1 dropped, 1 dead letter, 1 pending. West: 1 pending."""
    east = connect_region(config, "east")
    for index in range(5):
        put(east, entry(index))
    first = east.read(LEARNER_GROUP, "c", max_entries=4, block_ms=0)
    east.settle(LEARNER_GROUP, [(d.entry_id, "trained") for d in first[:2]] + [(first[2].entry_id, "dropped:age")])
    east.dead_letter(LEARNER_GROUP, first[3], "unreadable")
    east.close()
    west = connect_region(config, "west")
    put(west, entry(0))
    west.close()


def test_every_region_is_read(config: RunConfig) -> None:
    produce(config)
    ledger = read_ledger(config)
    assert list(ledger) == ["east", "west"]
    east = ledger["east"]
    assert (east.produced, east.pending, east.balanced) == (5, 1, True)
    assert east.fates == {"trained": 2, "dropped:age": 1, "dropped:dead_letter": 1}
    assert ledger["west"] == LedgerCounts(1, 1, {})


def test_a_run_nobody_has_heard_of_is_empty(config: RunConfig) -> None:
    assert read_ledger(config) == {"east": LedgerCounts(0, 0), "west": LedgerCounts(0, 0)}


def test_an_entry_added_behind_the_back_of_the_ledger_is_foreign(config: RunConfig, client, keys: Keys) -> None:
    produce(config)
    client.xadd(keys.trajectories, {"forged": "1"})
    east = read_ledger(config)["east"]
    assert (east.produced, east.foreign, east.pending, east.balanced) == (5, 1, 2, True)


def test_an_entry_removed_behind_its_back_shows(config: RunConfig, client, keys: Keys) -> None:
    produce(config)
    client.hincrby(keys.ledger, "trained", -1)
    assert not read_ledger(config)["east"].balanced


def test_a_region_that_cannot_be_reached_is_named_without_its_password(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    away = load_config(
        overrides=[f"regions.north.url=redis://:s3cret@127.0.0.1:{port}/0", "channel.connect_deadline_s=0.2"]
    )
    with pytest.raises(StreamUnavailableError, match=f"region north at redis://:.*@127.0.0.1:{port}") as caught:
        read_ledger(away)
    assert "s3cret" not in str(caught.value)
