"""A group that comes out of `decode_group` is well formed and bit for bit the one that went in; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.schemas.errors import SchemaVersionError, TrajectoryError, WireError
from anabranch.schemas.trajectory import SCHEMA, Group, Rollout, decode_group, encode_group, read_batch
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.groups import group, groups, rollout, same


def write(*batches: pa.RecordBatch, schema: pa.Schema | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema or batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), pa.field(name, values.type), values)


def good_batch() -> pa.RecordBatch:
    return read_batch(encode_group(group(3)))


@given(groups())
def test_round_trip_is_exact(sent: Group) -> None:
    assert same(decode_group(encode_group(sent)), sent)


@given(groups())
def test_encoding_is_a_function_of_the_group(sent: Group) -> None:
    payload = encode_group(sent)
    assert encode_group(decode_group(payload)) == payload


def test_decoded_arrays_are_read_only_views() -> None:
    decoded = decode_group(encode_group(group()))
    for array in (decoded.prompt_token_ids, decoded.rollouts[0].token_ids, decoded.rollouts[0].logprobs):
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_a_memoryview_is_as_good_as_bytes() -> None:
    payload = encode_group(group())
    assert same(decode_group(memoryview(payload)), decode_group(payload))


def test_rewards_are_in_the_order_of_the_rollouts() -> None:
    mixed = replace(group(), rollouts=(rollout(1, reward=0.0), rollout(0, reward=1.0)))
    assert mixed.rewards.tolist() == [0.0, 1.0]


BAD_ROLLOUTS: dict[str, Callable[[Rollout], Rollout]] = {
    "NaN log-prob": lambda r: replace(r, logprobs=np.array([-1.0, np.nan], np.float32)),
    "infinite log-prob": lambda r: replace(r, logprobs=np.array([-np.inf, -1.0], np.float32)),
    "log-prob above 0": lambda r: replace(r, logprobs=np.array([-1.0, 0.1], np.float32)),
    "NaN reward": lambda r: replace(r, reward=float("nan")),
    "infinite reward": lambda r: replace(r, reward=float("-inf")),
    "fewer log-probs than tokens": lambda r: replace(r, logprobs=r.logprobs[:1]),
    "no tokens": lambda r: replace(r, token_ids=r.token_ids[:0], logprobs=r.logprobs[:0]),
    "negative token id": lambda r: replace(r, token_ids=np.array([1, -5], np.int32)),
    "negative sample index": lambda r: replace(r, sample_index=-1),
    "no spans": lambda r: replace(r, spans=()),
    "first span not at 0": lambda r: replace(r, spans=(VersionSpan(PolicyVersion(1, 0), 1),)),
    "span beyond the end": lambda r: replace(
        r, spans=(VersionSpan(PolicyVersion(1, 0), 0), VersionSpan(PolicyVersion(1, 1), 2))
    ),
    "spans out of order": lambda r: replace(r, spans=tuple(VersionSpan(PolicyVersion(1, 0), s) for s in (0, 1, 1))),
    "negative version": lambda r: replace(r, spans=(VersionSpan(PolicyVersion(1, -1), 0),)),
    "negative epoch": lambda r: replace(r, spans=(VersionSpan(PolicyVersion(-1, 0), 0),)),
}


@pytest.mark.parametrize("fault", BAD_ROLLOUTS)
def test_a_malformed_rollout_is_refused_on_both_sides(fault: str) -> None:
    """On the producer's side at once; and on the learner's, if a producer let it pass."""
    bad = replace(group(7), rollouts=(rollout(0), BAD_ROLLOUTS[fault](rollout(1))))
    with pytest.raises(TrajectoryError, match="group 7"):
        encode_group(bad)
    with pytest.raises(TrajectoryError):
        decode_group(_encode_unchecked(bad))


def _encode_unchecked(bad: Group) -> bytes:
    rows = bad.rollouts
    batch = read_batch(encode_group(replace(bad, rollouts=tuple(rollout(r.sample_index) for r in rows))))
    spans = [[{"epoch": s.policy.epoch, "version": s.policy.version, "start": s.start} for s in r.spans] for r in rows]
    for name, values in {
        "sample_index": [r.sample_index for r in rows],
        "token_ids": [r.token_ids for r in rows],
        "logprobs": [r.logprobs for r in rows],
        "reward": [r.reward for r in rows],
        "version_spans": spans,
    }.items():
        batch = with_column(batch, name, pa.array(values, SCHEMA.field(name).type))
    return write(batch.replace_schema_metadata(SCHEMA.metadata))


def test_a_group_without_rollouts_or_prompt_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="no rollouts"):
        encode_group(replace(group(), rollouts=()))
    with pytest.raises(TrajectoryError, match="empty prompt"):
        encode_group(replace(group(), prompt_token_ids=np.array([], np.int32)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("run", ["run", "other"]),
        ("group_index", [3, 4]),
        ("attempt", [0, 1]),
        ("prompt_token_ids", [[5, 6], [5, 7]]),
        ("prompt_text", ["6 * 7 =", "1 + 1 ="]),
        ("answer", ["42", "2"]),
        ("group_size", [2, 3]),
        ("permit_ms", [0, 1]),
        ("spooled_ms", [0, 1]),
    ],
)
def test_an_entry_of_two_different_groups_is_refused(name: str, values: list[object]) -> None:
    mixed = with_column(good_batch(), name, pa.array(values, SCHEMA.field(name).type))
    with pytest.raises(TrajectoryError, match=name):
        decode_group(write(mixed))


@pytest.mark.parametrize("name", ["attempt", "group_index"])
def test_a_negative_number_of_the_group_is_refused_on_both_sides(name: str) -> None:
    """The learner keeps it in its fate log, which has no such: it must not die of it."""
    with pytest.raises(TrajectoryError, match="negative"):
        encode_group(replace(group(), **{name: -1}))
    negative = with_column(good_batch(), name, pa.array([-1, -1], SCHEMA.field(name).type))
    with pytest.raises(TrajectoryError, match="negative"):
        decode_group(write(negative))


def test_a_repeated_sample_index_is_refused() -> None:
    twice = with_column(good_batch(), "sample_index", pa.array([1, 1], pa.int32()))
    with pytest.raises(TrajectoryError, match="repeats a sample"):
        decode_group(write(twice))


def test_a_missing_column_is_named() -> None:
    batch = good_batch()
    with pytest.raises(TrajectoryError, match="logprobs"):
        decode_group(write(batch.drop_columns(["logprobs"])))


def test_a_column_of_another_type_is_named() -> None:
    wide = with_column(good_batch(), "token_ids", pa.array([[1, 2], [1, 2]], pa.list_(pa.int64())))
    with pytest.raises(TrajectoryError, match="token_ids has type"):
        decode_group(write(wide))


def test_a_duplicated_column_is_refused() -> None:
    batch = good_batch()
    twice = batch.append_column("reward", batch.column("reward"))
    with pytest.raises(TrajectoryError, match="reward"):
        decode_group(write(twice))


def test_nulls_are_refused() -> None:
    nulls = with_column(good_batch(), "reward", pa.array([1.0, None], pa.float64()))
    with pytest.raises(TrajectoryError, match="null"):
        decode_group(write(nulls))


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "version_spans"])
def test_nulls_inside_a_list_are_refused(name: str) -> None:
    kind = SCHEMA.field(name).type
    filler: dict[str, list[object]] = {
        "token_ids": [[1, None], [1, 2]],
        "logprobs": [[-1.0, None], [-1.0, -1.0]],
        "version_spans": [[{"epoch": 1, "version": 0, "start": 0}, None], [{"epoch": 1, "version": 0, "start": 0}]],
    }
    nullable = pa.array(filler[name], pa.list_(pa.field("item", kind.value_type, True)))
    with pytest.raises(TrajectoryError):
        decode_group(write(with_column(good_batch(), name, nullable)))


def test_a_slice_of_a_batch_decodes_to_its_own_rows() -> None:
    """Arrow slices share buffers with an offset; what is written and read must be the slice, not the buffer."""
    rows = tuple(rollout(s, tokens=s + 1, reward=float(s)) for s in range(5))
    whole = read_batch(encode_group(replace(group(9), rollouts=rows, group_size=0)))
    part = decode_group(write(whole.slice(2, 2)))
    assert [r.sample_index for r in part.rollouts] == [2, 3]
    assert [len(r.token_ids) for r in part.rollouts] == [3, 4]
    assert part.rewards.tolist() == [2.0, 3.0]


def test_columns_in_another_order_and_added_columns_are_read() -> None:
    """A newer minor version adds columns; nothing depends on their order."""
    batch = good_batch()
    newer = batch.select(SCHEMA.names[::-1]).append_column("route", pa.array(["a", "b"]))
    newer = newer.replace_schema_metadata({b"anabranch.trajectory": b"1.7"})
    assert same(decode_group(write(newer)), decode_group(write(batch)))


def older(batch: pa.RecordBatch, version: bytes = b"1.0") -> pa.RecordBatch:
    return batch.drop_columns(["group_size"]).replace_schema_metadata({b"anabranch.trajectory": version})


def test_a_batch_of_1_0_holds_a_whole_group() -> None:
    decoded = decode_group(write(older(good_batch())))
    assert same(decoded, group(3))
    assert (decoded.group_size, decoded.partial) == (2, False)


def test_the_column_that_1_1_added_is_not_missing_in_1_1() -> None:
    with pytest.raises(TrajectoryError, match="group_size"):
        decode_group(write(older(good_batch(), b"1.1")))


def test_a_partial_group_knows_how_many_were_asked_for() -> None:
    decoded = decode_group(encode_group(replace(group(3), group_size=8)))
    assert (decoded.group_size, len(decoded.rollouts), decoded.partial) == (8, 2, True)


@pytest.mark.parametrize("size", [1, 0, -1])
def test_more_rollouts_than_were_asked_for_are_refused(size: int) -> None:
    """Also 0, which a `Group` made here takes for "as many as there are"."""
    with pytest.raises(TrajectoryError, match=f"group 3: 2 rollouts of a group of {size}"):
        decode_group(write(with_column(good_batch(), "group_size", pa.array([size, size], pa.int32()))))
    if size:
        with pytest.raises(TrajectoryError, match="group 3: 2 rollouts"):
            encode_group(replace(group(3), group_size=size))


@pytest.mark.parametrize("metadata", [{b"anabranch.trajectory": b"2.0"}, {b"anabranch.trajectory": b"10.0"}, {}])
def test_another_major_version_is_refused_by_name(metadata: dict[bytes, bytes]) -> None:
    batch = good_batch().replace_schema_metadata(metadata)
    with pytest.raises(SchemaVersionError, match="reads 1"):
        decode_group(write(batch))


def test_exactly_one_batch() -> None:
    batch = good_batch()
    with pytest.raises(TrajectoryError, match="2 record batches"):
        decode_group(write(batch, batch))
    with pytest.raises(TrajectoryError, match="0 record batches"):
        decode_group(write(schema=batch.schema))
    with pytest.raises(TrajectoryError, match="no rows"):
        decode_group(write(batch.slice(0, 0)))


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_bytes_never_crash(data: st.DataObject) -> None:
    """Past the checksum of the envelope nothing mutated arrives; without it, still only a WireError or a well-formed group."""
    payload = bytearray(encode_group(group(1)))
    for _ in range(data.draw(st.integers(1, 6))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(payload), len(payload), data.draw(st.integers(0, len(payload)))]))
    try:
        decoded = decode_group(bytes(payload[:cut]))
    except WireError:
        return
    assert encode_group(decoded)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(WireError):
        decode_group(junk)
