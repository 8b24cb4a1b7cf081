from __future__ import annotations

import json

import pytest

from anabranch.deploy.stream_state import as_json, forget_producer, held_up_by, lag_of, refuse_learner, render
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.schemas.keys import LEARNER_GROUP, RECORDER_GROUP
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.stream import GroupLag, StreamState
from tests.groups import entry

HOURS_MS = 3 * 3_600_000


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (GroupLag("recorder", 3, 2, HOURS_MS), "group recorder holds 5 entries"),
        (GroupLag("recorder", 3, 0, None), "no consumer of it has ever read"),
        (GroupLag("learner", 0, 7, HOURS_MS), "7 entries wait for the learner, and it last read 3.0 h ago"),
        (GroupLag("recorder", 3, 2, 1000), ""),
        (GroupLag("recorder", 0, 0, HOURS_MS), ""),
    ],
)
def test_a_group_that_holds_the_stream_up_is_pointed_out(group, told):
    assert told in held_up_by(group)
    assert bool(told) == bool(held_up_by(group))


def test_only_a_group_that_may_go_is_to_be_forgotten():
    assert "anabranch stream forget-group recorder" in held_up_by(GroupLag("recorder", 1, 0, HOURS_MS))
    assert "forget-group" not in held_up_by(GroupLag("learner", 1, 0, HOURS_MS))


def test_the_table():
    states = {
        "east": StreamState(
            1234, 5_000_000, (GroupLag("learner", 3, 64, 150), GroupLag("recorder", 1234, 0, HOURS_MS))
        ),
        "west": StreamState(0, 0),
    }
    lines = render(states).splitlines()
    assert lines[1].split() == ["east", "1,234", "5,000,000", "learner", "3", "64", "0", "s"]
    assert lines[2].split() == ["recorder", "1,234", "0", "3.0", "h"]
    assert lines[3].split()[:3] == ["west", "0", "0"]
    assert "nobody has read yet" in lines[3]
    assert lines[5].startswith("east: group recorder holds 1,234 entries")
    east = json.loads(as_json(states))["east"]
    assert (east["entries"], east["bytes"]) == (1234, 5_000_000)
    assert [bool(group["holds_up"]) for group in east["groups"]] == [False, True]


def test_names_cannot_move_the_cursor():
    assert "\x1b" not in render({"east": StreamState(1, 1, (GroupLag("\x1b[2J", 1, 0, None),))})


def test_the_learner_is_never_forgotten():
    with pytest.raises(UsageError, match="never forgotten"):
        refuse_learner(LEARNER_GROUP)
    refuse_learner(RECORDER_GROUP)


def test_the_lag_of_a_group():
    stream = MemoryStream(MemoryStreamStore())
    stream.append([entry(1, producer="p"), entry(2, producer="p")], floor=1)
    stream.read(RECORDER_GROUP, "c", max_entries=1, block_ms=0)
    lag = lag_of(stream, RECORDER_GROUP)
    assert lag is not None
    assert (lag.undelivered, lag.pending) == (1, 1)
    assert lag_of(stream, "nobody") is None


def test_a_producer_is_forgotten_when_all_of_it_is_settled():
    stream = MemoryStream(MemoryStreamStore())
    assert not forget_producer(stream, "p")
    stream.append([entry(1, producer="p")], floor=1)
    (delivery,) = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    with pytest.raises(TemporaryError, match="has entries that the learner has not settled, from sequence number 1 on"):
        forget_producer(stream, "p")
    stream.settle(LEARNER_GROUP, [(delivery.entry_id, "trained")])
    assert forget_producer(stream, "p")
    assert not forget_producer(stream, "p")
