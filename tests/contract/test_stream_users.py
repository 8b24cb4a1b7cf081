"""The users that deploy/redis/region.conf advises may do all that a stream and its dead letters need."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import ConfigError
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_dead_letters import RedisDeadLetters
from anabranch.transport.redis_stream import RedisStream
from tests.contract.backends import SERVERS

GROUP = "learner"


def advised_rules() -> list[str]:
    """Of the user "learner", who does all of it."""
    text = (files("anabranch.deploy") / "redis" / "region.conf").read_text("utf-8")
    (rules,) = re.findall(r"user learner on #HASH (.*)", text)
    return rules.split()


def test_dead_letters_alone_do_not_fill_an_advised_server() -> None:
    """Nobody makes room among them but a person: a producer that sends only what nobody reads must not stop its region."""
    text = (files("anabranch.deploy") / "redis" / "region.conf").read_text("utf-8")
    (gigabytes,) = re.findall(r"^maxmemory (\d+)gb$", text, re.MULTILINE)
    large = 2**20  # an entry is 64 KB to 1 MB
    assert StreamSection().max_dead_letters * large <= int(gigabytes) * 2**30 / 4


@pytest.mark.parametrize("server", SERVERS)
def test_the_advised_user_may_do_all_that_a_stream_needs(client_of, server_named, keys, server):
    admin, where = client_of(server), server_named(server)
    admin.execute_command("ACL", "SETUSER", "learner", "reset", "on", ">pw", *advised_rules())
    try:
        client = connect(f"redis://learner:pw@127.0.0.1:{where.port}/0", deadline_s=10, what="the region")
        stream, letters = RedisStream(client, keys), RedisDeadLetters(client, keys)
        assert stream.append([Envelope("p", seq, seq, b"x") for seq in range(6)], floor=0) == 6
        assert stream.append([Envelope("p", 9, 9, b"x")], floor=0) == 6
        got = stream.read(GROUP, "c", max_entries=9, block_ms=0)
        assert len(stream.claim_idle(GROUP, "d", idle_ms=0, max_entries=1)) == 1
        assert len(stream.read_own_pending(GROUP, "c", max_entries=9)) == 5
        stream.dead_letter(GROUP, got[0], "unreadable")
        (letter,) = letters.list()
        assert letters.get(letter.letter_id)
        assert letters.requeue(letter.letter_id)
        stream.dead_letter(GROUP, stream.read(GROUP, "c", max_entries=9, block_ms=0)[0], "unreadable")
        assert letters.drop(letters.list()[0].letter_id)
        assert (letters.count(), letters.made_room()) == (0, 0)
        assert stream.settle(GROUP, [(d.entry_id, "trained") for d in got]) == 5
        stream.read("recorder", "c", max_entries=9, block_ms=0)
        assert stream.state().bytes_used > 0
        assert stream.forget_group("recorder")
        assert stream.trim() == 7
        assert stream.progress("p").next_seq == 6
        assert stream.forget_producer("p")
        assert stream.ledger(GROUP).balanced
        client.close()
    finally:
        admin.execute_command("ACL", "DELUSER", "learner")


@pytest.mark.parametrize("server", SERVERS)
def test_a_user_who_may_not_run_what_a_script_runs_is_told_so(client_of, server_named, keys, server):
    admin, where = client_of(server), server_named(server)
    admin.execute_command("ACL", "SETUSER", "half", "reset", "on", ">pw", "~*", "&*", "+@all", "-xinfo")
    try:
        RedisStream(admin, keys).append([Envelope("p", 0, 0, b"x")], floor=0)
        client = connect(f"redis://half:pw@127.0.0.1:{where.port}/0", deadline_s=10, what="the region")
        with pytest.raises(ConfigError, match="its ACL"):
            RedisStream(client, keys).ledger(GROUP)
        client.close()
    finally:
        admin.execute_command("ACL", "DELUSER", "half")
