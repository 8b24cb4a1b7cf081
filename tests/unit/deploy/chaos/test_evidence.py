"""Raw reading of a region's Redis and of a fate log."""

from __future__ import annotations

import json
from pathlib import Path

import redis

from anabranch.deploy.chaos.evidence import FateLine, Identity, read_books, read_fate_lines
from anabranch.deploy.chaos.monitor import client as raw_client
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey


def entry(producer: str, seq: int) -> dict[bytes, bytes]:
    return {b"producer": producer.encode(), b"seq": str(seq).encode(), b"payload": b"x"}


def test_books_of_a_region(valkey: EmbeddedValkey, client: redis.Redis, keys: Keys) -> None:
    server = raw_client(valkey.url)
    assert read_books(server, keys, "east").pending == 0
    client.xgroup_create(keys.trajectories, LEARNER_GROUP, "0", mkstream=True)
    ids = [client.xadd(keys.trajectories, entry("east-0-a", seq)) for seq in (1, 2, 3)]
    client.xadd(keys.trajectories, {b"what": b"garbage"})
    client.xadd(keys.trajectories, entry("east-0-a", 4))
    client.xreadgroup(LEARNER_GROUP, "learner-0", {keys.trajectories: ">"}, count=4)
    client.xack(keys.trajectories, LEARNER_GROUP, ids[0])
    client.xdel(keys.trajectories, ids[1])
    client.xadd(keys.dead_letters, {**entry("east-0-a", 9), b"cause": b"EnvelopeError"})
    client.xadd(keys.dead_letters, {b"cause": b"no producer"})
    client.hset(keys.ledger, mapping={"produced": 4, "trained": 1, "dropped:age": 0, "requeued": 0, "made_room": 3})
    client.hset(keys.seen, "east-0-a", 4)
    books = read_books(server, keys, "east")
    assert books.open == {Identity("east", "east-0-a", 3): 1, Identity("east", "east-0-a", 4): 1}
    assert books.unread == {Identity("east", "east-0-a", 4)}
    assert books.open_unreadable == 2, "the stranger's, and the one whose data somebody deleted"
    assert books.pending == 4
    assert (books.produced, books.added, books.foreign) == (4, 5, 1)
    assert books.fates == {"trained": 1, "dropped:age": 0}
    assert (books.dead, books.dead_letters) == ({Identity("east", "east-0-a", 9): 1}, 2)
    assert books.known == {"east-0-a": 4}
    server.close()


def test_fate_lines_and_damage(tmp_path: Path) -> None:
    line = {"region": "east", "producer": "p", "seq": 3, "group_index": 8, "fate": "trained", "epoch": 2, "more": 1}
    (tmp_path / "000001.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "000002.jsonl").write_text(json.dumps(line | {"seq": 4}) + "\n{torn\n" + json.dumps({"seq": 5}) + "\n")
    (tmp_path / "000001.counts.json").write_text("{}")
    lines, damage = read_fate_lines(tmp_path)
    assert lines == [FateLine(Identity("east", "p", seq), 8, "trained", 2) for seq in (3, 4)]
    assert [d.partition(":")[0] for d in damage] == ["000002.jsonl line 2", "000002.jsonl line 3"]
    assert read_fate_lines(tmp_path / "nothing") == ([], [])
