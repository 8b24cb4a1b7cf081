"""The answer to a command is lost on the way: nothing is stored twice, nothing delivered is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport.held_entries import HeldEntries
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_dead_letters import RedisDeadLetters
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from tests.contract.flaky_link import FlakyLink
from tests.streams import put

GROUP = "learner"


@pytest.fixture
def link(valkey) -> Iterator[FlakyLink]:
    made = FlakyLink(valkey.port)
    yield made
    made.close()


@pytest.fixture
def far(valkey, link):
    """A client over the link."""
    client = connect(valkey.url.replace(str(valkey.port), str(link.port)), deadline_s=10, what="the far Valkey")
    yield client
    client.close()


def entry(seq: int) -> Envelope:
    return Envelope("p", seq, group_index=seq, payload=b"arrow")


def seqs(deliveries) -> list[int]:
    return [open_envelope(d.fields, max_entry_bytes=100).seq for d in deliveries]


def test_an_append_whose_answer_is_lost_is_stored_once(client, far, link, keys: Keys):
    stream, near = RedisStream(far, keys), RedisStream(client, keys)
    put(stream, entry(0))
    link.lose_replies(b"EVALSHA")
    with pytest.raises(StreamUnavailableError, match=r":\*\*\*@127\.0\.0\.1"):
        stream.append([entry(1), entry(2)], floor=0)
    assert stream.append([entry(1), entry(2)], floor=0) == 3
    assert seqs(near.read(GROUP, "c", max_entries=9, block_ms=0)) == [0, 1, 2]
    assert near.ledger(GROUP).produced == 3


def test_what_a_lost_read_carried_is_handed_out_by_the_next(client, far, link, keys: Keys):
    stream, near = RedisStream(far, keys), RedisStream(client, keys)
    put(near, entry(0), entry(1))
    held = stream.read(GROUP, "c", max_entries=9, block_ms=0)
    put(near, entry(2))
    link.lose_replies(b"XREADGROUP")
    with pytest.raises(StreamUnavailableError, match=r":\*\*\*@127\.0\.0\.1"):
        stream.read(GROUP, "c", max_entries=9, block_ms=0)
    put(near, entry(3))

    assert seqs(stream.read(GROUP, "c", max_entries=9, block_ms=0)) == [2]
    assert seqs(stream.read(GROUP, "c", max_entries=9, block_ms=0)) == [3]
    pending = client.xpending_range(keys.trajectories, GROUP, "-", "+", 9)
    by_id = {row["message_id"].decode(): row["times_delivered"] for row in pending}
    assert [by_id[d.entry_id] for d in held] == [1, 1], "held entries were not delivered again"
    assert near.ledger(GROUP).pending == 4


def test_what_a_lost_claim_carried_is_handed_out_by_the_next_read(client, far, link, keys: Keys):
    stream, near = RedisStream(far, keys), RedisStream(client, keys)
    put(near, entry(0))
    near.read(GROUP, "dead", max_entries=9, block_ms=0)
    assert stream.claim_idle(GROUP, "c", idle_ms=60_000, max_entries=9) == []
    link.lose_replies(b"EVALSHA")
    with pytest.raises(StreamUnavailableError):
        stream.claim_idle(GROUP, "c", idle_ms=0, max_entries=9)
    assert seqs(stream.read(GROUP, "c", max_entries=9, block_ms=0)) == [0]
    assert stream.read(GROUP, "c", max_entries=9, block_ms=0) == []


def test_a_settle_whose_answer_is_lost_counts_once(client, far, link, keys: Keys):
    stream, near = RedisStream(far, keys), RedisStream(client, keys)
    put(near, entry(0), entry(1))
    one, two = stream.read(GROUP, "c", max_entries=9, block_ms=0)
    stream.settle(GROUP, [(one.entry_id, "trained")])
    link.lose_replies(b"EVALSHA")
    stream.settle(GROUP, [(two.entry_id, "trained")])
    assert near.ledger(GROUP).fates == {"trained": 2}


def test_permits_whose_answer_is_lost_are_not_leased_for_nothing(client, far, link, keys: Keys):
    permits, near = RedisPermits(far, keys), RedisPermits(client, keys)
    near.reset(epoch=1, version=0, batch=4, max_age=0, total=4, accepted=())
    assert [p.group_index for p in permits.take("p", max_groups=1, lease_ms=60_000)] == [0]
    link.lose_replies(b"EVALSHA")
    assert [p.group_index for p in permits.take("p", max_groups=2, lease_ms=60_000)] == [1, 2]
    assert link.lost == 1
    assert [p.group_index for p in near.take("q", max_groups=9, lease_ms=60_000)] == [3]


def test_permits_whose_answer_stays_lost_come_with_the_next_call(client, far, link, keys: Keys):
    """The call gives up before the link is back: what it was leased is the lowest there is, and a step waits for it."""
    permits, near = RedisPermits(far, keys), RedisPermits(client, keys)
    near.reset(epoch=1, version=0, batch=5, max_age=0, total=5, accepted=())
    assert [p.group_index for p in near.take("q", max_groups=1, lease_ms=60_000)] == [
        0
    ]  # the server knows the script now
    link.lose_replies(b"EVALSHA", times=10**6)
    with pytest.raises(StreamUnavailableError):
        permits.take("p", max_groups=2, lease_ms=60_000)
    assert near.state().leased == {"p": 2, "q": 1}
    link.lose_replies(b"EVALSHA", times=0)
    assert [(p.group_index, p.attempt) for p in permits.take("p", max_groups=3, lease_ms=60_000)] == [(1, 0), (2, 0)]
    assert [p.group_index for p in permits.take("p", max_groups=3, lease_ms=60_000)] == [3, 4]


def test_a_link_that_keeps_losing_replies_ends_in_an_error_within_bounds(far, link, keys: Keys):
    permits = RedisPermits(far, keys)
    permits.reset(epoch=1, version=0, batch=4, max_age=0, total=4, accepted=())
    link.lose_replies(b"EVALSHA", times=10**6)
    start = time.monotonic()
    with pytest.raises(StreamUnavailableError, match="check that it runs"):
        permits.settle([0])
    assert time.monotonic() - start < 20
    assert link.lost > 1


def test_a_requeue_whose_answer_is_lost_has_moved_the_letter_once(client, far, link, keys: Keys):
    near = RedisStream(client, keys)
    put(near, entry(0))
    near.dead_letter(GROUP, near.read(GROUP, "c", max_entries=9, block_ms=0)[0], "unreadable")
    letters, here = RedisDeadLetters(far, keys), RedisDeadLetters(client, keys)
    (letter,) = letters.list()
    assert letters.requeue("1-1") is None
    link.lose_replies(b"EVALSHA")
    with pytest.raises(StreamUnavailableError):
        letters.requeue(letter.letter_id)
    assert letters.requeue(letter.letter_id) is None
    counts = near.ledger(GROUP)
    assert (counts.pending, counts.fates, counts.balanced, here.count()) == (1, {}, True, 0)


def test_what_others_have_claimed_is_not_remembered_as_held(client, keys: Keys):
    """A consumer whose entries are always taken over by another must not remember them for ever."""
    stream, near = RedisStream(client, keys), RedisStream(client, keys)
    stream._held = HeldEntries(check_at=10)
    for first in range(0, 60, 3):
        put(near, *(entry(seq) for seq in range(first, first + 3)))
        assert len(stream.read(GROUP, "slow", max_entries=9, block_ms=0)) == 3
        taken = near.claim_idle(GROUP, "fast", idle_ms=0, max_entries=9)
        near.settle(GROUP, [(d.entry_id, "trained") for d in taken])
    assert len(stream._held.of(GROUP, "slow")) < 10
    assert near.ledger(GROUP).fates == {"trained": 60}
