"""A server that takes no more data: whoever adds is told so and nothing is half done; whoever makes room still can, and the
ledger stays exact. Memory at its limit on every backend; a disk that is full where there is a disk."""

from __future__ import annotations

import contextlib
import resource
import time
from importlib.resources import files

import pytest
from redis import exceptions

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError
from anabranch.schemas.keys import Keys
from anabranch.transport import scripts
from anabranch.transport.embedded_valkey import EmbeddedValkey, server_binary
from anabranch.transport.redis_client import connect
from anabranch.transport.stream import ProducerProgress
from tests import servers
from tests.contract.backends import SERVERS, Backend, redis_backend

GROUP = "learner"


def entries(*seqs: int, size: int = 1000) -> list[Envelope]:
    return [Envelope("p", seq, seq, bytes(size)) for seq in seqs]


def read(stream, group: str = GROUP, consumer: str = "c"):
    return stream.read(group, consumer, max_entries=100, block_ms=0)


def books(backend: Backend) -> object:
    stream = backend.stream()
    return stream.ledger(GROUP), stream.progress("p"), backend.size(), backend.letters().list()


def test_an_append_is_back_pressure_and_leaves_no_trace(backend):
    stream = backend.stream()
    stream.append(entries(0, 1), floor=0)
    before = books(backend)
    backend.set_full(True)
    for given in (entries(2), entries(2, 3, 4), entries(0, 1, 2)):
        with pytest.raises(BackpressureError, match="takes no more"):
            stream.append(given, floor=0)
    assert books(backend) == before
    backend.set_full(False)
    assert stream.append(entries(2, 3, 4), floor=0) == 5


def test_reading_settling_and_trimming_go_on_and_count(backend):
    """By itself an acknowledgement passes on a full server, and the count of its fate is refused: they are one script."""
    stream = backend.stream()
    stream.append(entries(*range(8)), floor=0)
    backend.set_full(True)
    got = read(stream)
    assert len(got) == 8, "the group is made even now: only who reads can make room"
    assert stream.settle(GROUP, [(got[0].entry_id, "trained"), (got[1].entry_id, "dropped:age")]) == 2
    stream.dead_letter(GROUP, got[2], "unreadable")
    backend.delete_entry(got[3].entry_id)
    backend.delete_entry(got[4].entry_id)
    assert len(stream.read_own_pending(GROUP, "c", max_entries=1)) == 1
    assert [d.entry_id for d in stream.claim_idle(GROUP, "d", idle_ms=0, max_entries=9)] == [
        d.entry_id for d in got[5:]
    ]
    counts = stream.ledger(GROUP)
    assert counts.fates == {"trained": 1, "dropped:age": 1, "dropped:dead_letter": 1, "dropped:lost": 2}
    assert (counts.produced, counts.pending, counts.balanced) == (8, 3, True)
    assert stream.progress("p") == ProducerProgress(8, 5)
    stream.settle(GROUP, [(d.entry_id, "trained") for d in got[5:]])
    assert stream.state().entries == 6
    assert stream.trim() == 6
    assert stream.forget_producer("p")
    assert stream.ledger(GROUP).balanced


def test_dead_letters_can_be_listed_and_dropped(backend):
    stream = backend.stream()
    stream.append(entries(0), floor=0)
    stream.dead_letter(GROUP, read(stream)[0], "unreadable")
    backend.set_full(True)
    letters = backend.letters()
    (letter,) = letters.list()
    assert letters.get(letter.letter_id) is not None
    assert letters.drop(letter.letter_id)
    assert stream.ledger(GROUP).balanced


def test_the_room_that_trimming_makes_is_used_again(tmp_path, backend_program):
    with EmbeddedValkey(tmp_path / "v", maxmemory_bytes=6 * 2**20, fsync="everysec", program=backend_program) as server:
        client = connect(server.url, deadline_s=10, what="the region")
        backend = redis_backend("full", lambda: client, Keys("r"))
        stream, stored = backend.stream(), 0
        for _ in range(3):
            filled = stored
            with contextlib.suppress(BackpressureError):
                while stored < filled + 1000:
                    stored = stream.append(entries(stored, size=100_000), floor=stored)
            assert stored < filled + 1000, "it was never full"
            assert stored > filled + 3
            assert stream.ledger(GROUP).pending == stored - filled
            got = read(stream)
            assert stream.settle(GROUP, [(d.entry_id, "trained") for d in got]) == stored - filled
            assert stream.trim() == stored - filled
            counts = stream.ledger(GROUP)
            assert (counts.produced, counts.fates, counts.balanced) == (stored, {"trained": stored}, True)
        client.close()


@pytest.fixture(params=SERVERS)
def backend_program(request: pytest.FixtureRequest, tmp_path):
    return server_binary() if request.param == "valkey" else servers.debian_redis(tmp_path)


def test_a_disk_that_is_full_is_back_pressure_too(tmp_path, backend_program):
    with EmbeddedValkey(tmp_path / "v", fsync="everysec", program=backend_program) as server:
        client = connect(server.url, deadline_s=10, what="the region")
        backend = redis_backend("full", lambda: client, Keys("r"))
        stream = backend.stream()
        stream.append(entries(*range(6)), floor=0)
        got = read(stream)
        stream.settle(GROUP, [(got[0].entry_id, "trained")])
        stream.dead_letter(GROUP, got[1], "unreadable")
        (letter,) = backend.letters().list()
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, hard))  # its append-only file takes no more
        end = time.monotonic() + 20
        with contextlib.suppress(exceptions.ResponseError):  # refused from the write after the one that failed
            while time.monotonic() < end:
                client.set("written by somebody else", "x")
        before = books(backend)
        acts = [
            lambda: stream.append(entries(6, 7), floor=0),
            lambda: stream.settle(GROUP, [(got[2].entry_id, "trained")]),
            lambda: stream.dead_letter(GROUP, got[3], "unreadable"),
            lambda: stream.claim_idle(GROUP, "d", idle_ms=0, max_entries=1),
            lambda: backend.letters().requeue(letter.letter_id),
            stream.trim,
        ]
        for act in acts:
            with pytest.raises(BackpressureError, match=r"MISCONF.*more memory or disk"):
                act()
        assert books(backend) == before
        assert before[0].balanced

        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        while True:  # the server looks at its disk once a second
            assert time.monotonic() < end, "the server did not come back"
            try:
                assert stream.append(entries(6, 7), floor=0) == 8
                break
            except BackpressureError:
                time.sleep(0.05)
        for act in acts[1:]:
            act()
        counts = stream.ledger(GROUP)
        assert counts.fates == {"trained": 2, "dropped:dead_letter": 1}
        assert (counts.produced, counts.pending, counts.balanced) == (8, 5, True)
        client.close()


def test_every_script_says_what_a_full_server_is_to_do_with_it():
    heads = {
        path.name: path.read_text("utf-8").partition("\n")[0]
        for path in (files("anabranch.transport") / "lua").iterdir()
        if path.name.endswith(".lua") and not path.name.endswith("_prelude.lua")
    }
    assert len(heads) > 30
    assert set(heads.values()) == {"#!lua", "#!lua flags=allow-oom", "#!lua flags=no-writes"}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("head", "passes"), [("", True), ("#!lua\n", False), ("#!lua flags=allow-oom\n", True)])
def test_without_that_line_the_order_of_commands_would_decide(client_of, keys, server, head, passes):
    """Why every script has it: a full server takes all that comes after a command it does not refuse."""
    client = client_of(server)
    script = head + "redis.call('SREM', KEYS[1], 'x') redis.call('SET', KEYS[2], 'more') return 1"
    client.sadd(keys.trajectories, "x")
    client.config_set("maxmemory", 1)
    try:
        with contextlib.nullcontext() if passes else pytest.raises(exceptions.OutOfMemoryError):
            client.eval(script, 2, keys.trajectories, keys.seen)
    finally:
        client.config_set("maxmemory", 0)
    assert (client.scard(keys.trajectories), client.exists(keys.seen)) == ((0, 1) if passes else (1, 0))


def test_scripts_are_sent_again_to_a_server_that_forgot_them(client, keys):
    backend = redis_backend("valkey", lambda: client, keys)
    stream = backend.stream()
    stream.append(entries(0), floor=0)
    client.script_flush()
    assert stream.append(entries(1, 2), floor=0) == 3
    client.script_flush()
    assert stream.progress("p").next_seq == 3
    assert scripts.load(client, "stream_progress", prelude="stream_prelude").script.startswith(
        "#!lua flags=no-writes\n"
    )
