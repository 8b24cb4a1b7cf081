"""The codec that works on whole columns agrees with the plain one: bytes, groups, and the words of every refusal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.schemas import trajectory_codec
from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.trajectory import SCHEMA, Group, decode_group, encode_group, read_batch, stamp_spooled
from anabranch.schemas.trajectory_batch import read_any
from anabranch.schemas.trajectory_frame import BODY, PLACES, find_frame
from anabranch.schemas.trajectory_reference import columns_of, encode_slowly, group_of_batch
from anabranch.schemas.trajectory_schema import LaterRollouts, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.groups import fields_of, group, groups, rollout


def outcome(act: Callable[[], Any]) -> object:
    """What `act` returns, or the words of its refusal."""
    try:
        done = act()
    except TrajectoryError as error:
        return str(error)
    return fields_of(done) if isinstance(done, Group) else done


def written(columns: list[pa.Array]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return sink.getvalue().to_pybytes()


@given(groups())
def test_a_good_group_is_written_and_read_as_by_the_reference(good: Group) -> None:
    payload = encode_group(good)
    assert payload == encode_slowly(good)
    assert fields_of(decode_group(payload)) == fields_of(group_of_batch(read_any(payload))) == fields_of(good)


@given(groups(), st.integers(0, 2**62))
def test_a_stamp_is_the_time_that_was_put_in_and_nothing_else(good: Group, spooled_ms: int) -> None:
    assert stamp_spooled(encode_group(good), spooled_ms) == encode_group(replace(good, spooled_ms=spooled_ms))


@given(groups())
def test_a_good_group_never_needs_the_reference(good: Group) -> None:
    """Else the test above would compare the reference with itself."""
    assert trajectory_codec._payload_of(good) is not None
    payload = encode_slowly(good)
    frame = find_frame(payload)
    assert frame is not None
    assert trajectory_codec._group_of(payload, frame) is not None


@given(groups(), st.data())
def test_rows_of_a_larger_batch_are_read_as_by_the_reference(good: Group, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(good.rollouts) - 1))
    part = read_batch(encode_group(good)).slice(first, data.draw(st.integers(1, len(good.rollouts) - first)))
    payload = written(part.columns)
    assert (
        fields_of(decode_group(payload))
        == fields_of(group_of_batch(read_any(payload)))
        == fields_of(group_of_batch(part))
    )


@given(groups())
def test_what_is_known_without_the_rollouts_is_what_they_say(good: Group) -> None:
    decoded = decode_group(encode_group(good))
    assert isinstance(decoded.rollouts, LaterRollouts)
    assert decoded.highest_token_id == good.highest_token_id
    assert decoded.policies == good.policies
    assert len(decoded.rollouts) == len(good.rollouts)


def test_rollouts_are_made_once_and_when_asked_for() -> None:
    made: list[tuple[Rollout, ...]] = []

    def make() -> tuple[Rollout, ...]:
        made.append(tuple(rollout(s) for s in range(3)))
        return made[-1]

    later = LaterRollouts(3, make, 2, frozenset())
    assert (len(later), made) == (3, [])
    assert list(later) == list(made[0])
    assert later[1] is made[0][1]
    assert later[1:] == made[0][1:]
    assert later == made[0]
    assert made[0] == later
    assert len(made) == 1


@pytest.mark.parametrize("name", ["prompt_token_ids", "token_ids", "logprobs", "version_spans", "text", "answer"])
@pytest.mark.parametrize(
    ("row", "add"), [(0, 1), (0, -1), (1, 1), (1, -1), (1, -(2**20)), (-1, -1), (-1, 1), (-1, 2**20)]
)
def test_offsets_of_another_writer_are_judged_as_by_the_reference(name: str, row: int, add: int) -> None:
    """Arrow allows those that do not begin at 0, or do not end with the values; what they make of the rows is the reference's."""
    payload = bytearray(encode_group(group(3)))
    frame = find_frame(payload)
    assert frame is not None
    at = BODY + frame.starts[PLACES[name].buffer] + 4 * (row % 3)
    (offset,) = struct.unpack_from("<i", payload, at)
    struct.pack_into("<i", payload, at, offset + add)
    assert outcome(lambda: decode_group(bytes(payload))) == outcome(lambda: group_of_batch(read_any(bytes(payload))))


@pytest.mark.parametrize("behind", [b"", b"\0" * 8, b"\xff\xff\xff\xff\0\0\0\0" * 2])
def test_what_follows_the_batch_is_judged_as_by_arrow(behind: bytes) -> None:
    """A stream may end without its mark; whatever comes behind the mark is nobody's."""
    payload = encode_group(group(3))[:-8] + behind
    assert outcome(lambda: decode_group(payload)) == fields_of(group(3))


ODD = st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, 1e-3, 0.0011, -1.0])
small = st.integers(-1, 4)
policies = st.builds(PolicyVersion, st.integers(-1, 2), st.integers(-1, 2))
spans = st.lists(st.builds(VersionSpan, policies, small), max_size=3).map(tuple)
ids = st.lists(small, max_size=4).map(lambda found: np.array(found, np.int32))
logprobs = st.lists(st.one_of(st.just(-1.0), ODD), min_size=2, max_size=3).map(
    lambda found: np.array(found, np.float32)
)
odd_rollout_fields: dict[str, st.SearchStrategy[Any]] = {
    "sample_index": small, "token_ids": ids, "logprobs": logprobs, "spans": spans, "reward": ODD,
}  # fmt: skip
odd_group_fields: dict[str, st.SearchStrategy[Any]] = {
    "group_index": small, "prompt_token_ids": ids, "group_size": small, "rollouts": st.just(()),
}  # fmt: skip


@st.composite
def odd_groups(draw: st.DrawFn) -> Group:
    """A good group of which one or two fields are anything."""
    made = replace(group(3), rollouts=tuple(rollout(s) for s in range(3)), group_size=3)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*odd_rollout_fields, *odd_group_fields]))
        if name in odd_group_fields:
            made = replace(made, **{name: draw(odd_group_fields[name])})
        elif made.rollouts:
            at = draw(st.integers(0, 2))
            odd = replace(made.rollouts[at], **{name: draw(odd_rollout_fields[name])})
            made = replace(made, rollouts=(*made.rollouts[:at], odd, *made.rollouts[at + 1 :]))
    return made


@settings(max_examples=400)
@given(odd_groups())
def test_what_is_wrong_is_said_in_the_same_words(odd: Group) -> None:
    assert outcome(lambda: encode_group(odd)) == outcome(lambda: encode_slowly(odd))
    if odd.rollouts:
        payload = written(columns_of(odd))  # as a producer that checks nothing would
        assert outcome(lambda: decode_group(payload)) == outcome(lambda: group_of_batch(read_any(payload)))


@given(groups(), groups(), st.sampled_from(SCHEMA.names), st.data())
def test_rows_of_two_groups_are_refused_in_the_same_words(
    one: Group, two: Group, name: str, data: st.DataObject
) -> None:
    """One column of one row is another group's: sometimes that is well formed, most often not."""
    columns = columns_of(one)
    at, row = SCHEMA.names.index(name), data.draw(st.integers(0, len(one.rollouts) - 1))
    values = columns[at].to_pylist()
    values[row] = columns_of(two)[at].to_pylist()[0]
    columns[at] = pa.array(values, SCHEMA.field(at).type)
    payload = written(columns)
    assert outcome(lambda: decode_group(payload)) == outcome(lambda: group_of_batch(read_any(payload)))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "\ud800"},
        {"attempt": 2**40},
        {"answer": None},
        {"rollouts": (rollout(), replace(rollout(1), text=None))},
        {"rollouts": (replace(rollout(), started_ms=2**70),)},
        {"rollouts": (replace(rollout(), token_ids=np.array([1, 2**40])),)},
    ],
    ids=["half a surrogate pair", "no int32", "no text", "one without text", "no int64", "a token id that is no int32"],
)
def test_a_value_that_fits_no_column_is_a_trajectory_error(change: dict[str, Any]) -> None:
    """The outbox takes it for a bad group; anything else would end the producer."""
    with pytest.raises(TrajectoryError, match="group 3"):
        encode_group(replace(group(3), **change))


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, ">i4"])
def test_token_ids_of_another_type_are_written_as_int32(dtype: Any) -> None:
    same = replace(group(3), rollouts=(replace(rollout(), token_ids=np.array([1, 2], dtype)),), group_size=2)
    assert decode_group(encode_group(same)).rollouts[0].token_ids.dtype == np.int32
    assert decode_group(encode_group(same)).rollouts[0].token_ids.tolist() == [1, 2]
