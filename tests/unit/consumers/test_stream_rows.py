"""Streams looked at: each entry once, damage counted, bounded."""

from __future__ import annotations

from dataclasses import replace

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.stream_rows import StreamRows
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.stream import Delivery
from tests.groups import entry
from tests.streams import put


class Away(MemoryStream):
    def look(self, *, after_id: str = "0-0", max_entries: int) -> list[Delivery]:
        raise StreamUnavailableError("gone")


def rows(streams: dict, **limits: int) -> StreamRows:
    return StreamRows(streams, **({"max_entry_bytes": 10**6} | limits))


def test_each_entry_once_and_new_ones_as_they_come() -> None:
    world = MemoryWorld("run", ["east"])
    put(world.stream("east"), *(entry(i) for i in range(600)))
    look = rows(world.streams())
    table = look.read()
    assert table is not None
    assert table.column("seq").to_pylist()[::2] == list(range(600))
    assert look.read() is None
    put(world.stream("east"), entry(600))
    table = look.read()
    assert table is not None
    assert table.column("group_index").to_pylist() == [600, 600]


def test_a_row_has_the_name_of_its_envelope() -> None:
    world = MemoryWorld("run", ["east"])
    put(world.stream("east"), replace(entry(1), producer="twin"))
    table = rows(world.streams()).read()
    assert table is not None
    assert set(table.column("producer").to_pylist()) == {"twin"}


def test_a_time_that_the_producer_did_not_tell_is_null_where_it_is_read() -> None:
    world = MemoryWorld("run", ["east"])
    put(world.stream("east"), entry(0), entry(1, permit_ms=5, spooled_ms=7))
    with RunReader(None, streams=world.streams()) as reader:
        found = reader.rows("SELECT DISTINCT seq, permit_ms, scored_ms, spooled_ms FROM trajectories ORDER BY seq")
    assert [tuple(row.values()) for row in found] == [(0, None, None, None), (1, 5, None, 7)]


def test_what_nobody_can_read_is_counted_and_passed_over() -> None:
    world = MemoryWorld("run", ["east"])
    stream = world.stream("east")
    put(stream, entry(0))
    store = stream._store
    store.add({b"v": b"1", b"payload": b"garbage"})
    put(stream, entry(1))
    look = rows(world.streams())
    table = look.read()
    assert table is not None
    assert table.num_rows == 4
    assert look.unreadable == {"east": 1}


def test_a_region_that_is_away_is_named_and_the_others_are_read() -> None:
    world = MemoryWorld("run", ["east", "west"])
    put(world.stream("west"), entry(0))
    look = rows({"east": Away(world.stream("east")._store), "west": world.stream("west")})
    table = look.read()
    assert table is not None
    assert table.num_rows == 2
    assert look.away == {"east": "gone"}


def test_more_than_is_taken_is_told() -> None:
    world = MemoryWorld("run", ["east"])
    put(world.stream("east"), *(entry(i) for i in range(20)))
    size = len(entry(0).payload)
    look = rows(world.streams(), max_bytes=5 * size)
    table = look.read()
    assert table is not None
    assert table.num_rows == 10
    assert look.left_out == {"east"}
