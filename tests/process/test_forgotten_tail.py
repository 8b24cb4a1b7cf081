"""A server is killed and comes back without the last bytes of its append-only file, wherever they end: no act is there by
half, the producer is told what is missing, and given that the books are those of an unbroken run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey, server_binary
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_dead_letters import RedisDeadLetters
from anabranch.transport.redis_stream import RedisStream
from tests import servers
from tests.contract.backends import SERVERS

pytestmark = pytest.mark.process

GROUP = "learner"
KEYS = Keys("r")
COUNT = 12


def entries(*seqs: int) -> list[Envelope]:
    return [Envelope("p", seq, seq, b"payload %d" % seq) for seq in seqs]


def write_history(server: EmbeddedValkey) -> None:
    client = connect(server.url, deadline_s=10, what="the region")
    stream, letters = RedisStream(client, KEYS), RedisDeadLetters(client, KEYS)
    for first in range(0, COUNT, 3):
        stream.append(entries(first, first + 1, first + 2), floor=0)
        stream.append(entries(first + 9), floor=0)  # kept out
        for n, delivery in enumerate(stream.read(GROUP, "c", max_entries=9, block_ms=0)):
            if n:
                stream.settle(GROUP, [(delivery.entry_id, "trained")])
            else:
                stream.dead_letter(GROUP, delivery, "unreadable")
        letters.requeue(letters.list()[0].letter_id)
        stream.trim()
    client.close()


def append_only_file(folder: Path) -> Path:
    (found,) = folder.glob("appendonlydir/*.incr.aof")
    return found


@pytest.mark.parametrize("server_name", SERVERS)
def test_wherever_the_file_ends_the_books_are_exact(tmp_path, server_name):
    program = server_binary() if server_name == "valkey" else servers.debian_redis(tmp_path)
    with EmbeddedValkey(tmp_path / "whole", fsync="everysec", program=program, password="pw") as server:
        write_history(server)
        server.kill()
    whole = append_only_file(tmp_path / "whole").read_bytes()
    begins = whole.index(b"XGROUP")  # of the first append
    cuts = random.Random(5).sample(range(begins, len(whole)), 24)
    told = set()
    for number, cut in enumerate(cuts):
        folder = tmp_path / f"cut {number}"
        shutil.copytree(tmp_path / "whole", folder)
        append_only_file(folder).write_bytes(whole[:cut])
        with EmbeddedValkey(folder, fsync="everysec", program=program, password="pw") as server:
            client = connect(server.url, deadline_s=10, what="the region")
            stream = RedisStream(client, KEYS)
            assert not client.exists(f"{KEYS.trajectories}:shut")
            assert stream.ledger(GROUP).balanced
            assert client.zcard(KEYS.open_entries) == client.hlen(KEYS.open_ids) == stream.ledger(GROUP).pending
            known = stream.progress("p").next_seq or 0
            told.add(known)
            assert stream.append(entries(*range(known, COUNT + 1)), floor=min(known, 3)) == COUNT + 1
            waiting = stream.read_own_pending(GROUP, "c", max_entries=99)
            waiting += stream.read(GROUP, "c", max_entries=99, block_ms=0)
            seqs = {open_envelope(d.fields, max_entry_bytes=99).seq for d in waiting}
            assert seqs >= set(range(known, COUNT + 1)), "what was forgotten is there again"
            stream.settle(GROUP, [(d.entry_id, "trained") for d in waiting])
            letters = RedisDeadLetters(client, KEYS)
            counts = stream.ledger(GROUP)
            assert (counts.produced, counts.foreign, counts.pending) == (COUNT + 1, 0, 0)
            assert counts.balanced
            assert counts.fates.get("dropped:dead_letter", 0) == letters.count()
            client.close()
    assert len(told) > 2, "the cuts fell into one place"
