"""What an append does on a server while one of its entries is kept out, which renames the stream for that moment: replicas and
whoever waits on them see nothing of it, and nothing is left of it."""

from __future__ import annotations

import threading
import time

import pytest

from anabranch.schemas.envelope import Envelope
from anabranch.transport.embedded_valkey import EmbeddedValkey, server_binary
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.retry import wait_until
from tests import servers
from tests.contract.backends import SERVERS

GROUP = "learner"


def entries(*seqs: int) -> list[Envelope]:
    return [Envelope("p", seq, seq, b"arrow") for seq in seqs]


def contents(client, keys) -> object:
    """All that a server holds of a stream; of its groups what is replicated."""
    groups = [
        {k: g[k] for k in ("name", "pending", "last-delivered-id")} for g in client.xinfo_groups(keys.trajectories)
    ]
    books = client.hgetall(keys.seen), client.hgetall(keys.ledger), client.hgetall(keys.open_ids)
    return client.xrange(keys.trajectories), groups, books, client.zrange(keys.open_entries, 0, -1), client.dbsize()


@pytest.mark.parametrize("server_name", SERVERS)
def test_a_replica_and_who_waits_on_it_see_whole_appends_only(tmp_path, keys, server_name):
    program = server_binary() if server_name == "valkey" else servers.debian_redis(tmp_path)
    made = [EmbeddedValkey(tmp_path / name, fsync="everysec", program=program, password="pw") for name in "ab"]
    with made[0] as server, made[1] as replica:
        far, waiting = (connect(replica.url, deadline_s=10, what="the replica") for _ in range(2))
        client = connect(server.url, deadline_s=10, what="the region")
        client.config_set("repl-diskless-sync-delay", 0)
        far.config_set("masterauth", "pw")
        far.replicaof("127.0.0.1", server.port)
        wait_until(lambda: client.wait(1, 100), deadline_s=20, what="the replica")
        stream = RedisStream(client, keys)
        stream.append(entries(0, 1), floor=0)
        stream.settle(GROUP, [(d.entry_id, "trained") for d in stream.read(GROUP, "c", max_entries=1, block_ms=0)])
        assert client.wait(1, 4000) == 1
        replies: list[object] = []
        last = client.xrevrange(keys.trajectories, count=1)[0][0]
        reader = threading.Thread(
            target=lambda: replies.append(waiting.xread({keys.trajectories: last}, count=9, block=4000))
        )
        reader.start()
        time.sleep(0.1)
        for _ in range(20):
            assert stream.append(entries(7, 8), floor=0) == 2
        assert client.wait(1, 4000) == 1
        assert reader.is_alive()
        stream.append(entries(2, 3), floor=0)
        reader.join(10)
        ((found,),) = [reply.values() for reply in replies]
        assert len(found) == 2
        assert client.wait(1, 4000) == 1
        assert contents(far, keys) == contents(client, keys)
        assert not far.exists(f"{keys.trajectories}:shut")
        for each in (client, far, waiting):
            each.close()


@pytest.mark.parametrize("server_name", SERVERS)
@pytest.mark.parametrize("next_seq", [2, 5])
def test_a_stream_that_was_left_under_its_other_name_is_found_again(client_of, keys, server_name, next_seq):
    """It cannot be, while a transaction is all or nothing; but everything in the region would be in it."""
    client = client_of(server_name)
    stream = RedisStream(client, keys)
    stream.append(entries(0, 1), floor=0)
    stream.read(GROUP, "c", max_entries=1, block_ms=0)
    client.rename(keys.trajectories, f"{keys.trajectories}:shut")
    assert stream.append(entries(next_seq), floor=0) == (3 if next_seq == 2 else 2)
    assert not client.exists(f"{keys.trajectories}:shut")
    counts = stream.ledger(GROUP)
    assert counts.balanced
    assert counts.pending == counts.produced == client.hlen(keys.open_ids) == (3 if next_seq == 2 else 2)
