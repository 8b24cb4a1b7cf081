"""What a recorder keeps of an entry, and where it puts it."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from anabranch.consumers.recorded_files import Partition, parse_name
from anabranch.consumers.recorded_rows import Entry, partition_of, rows_of
from anabranch.schemas.trajectory import Group, encode_group, read_batch
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.groups import group, rollout


def entry(made: Group, entry_id: str = "1796103071764-3", seq: int = 380) -> Entry:
    return Entry(entry_id, seq, read_batch(encode_group(made)))


def spans(*policies: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(PolicyVersion(*policy), start) for start, policy in enumerate(policies))


def two(first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...]) -> Group:
    made = group(4)
    rollouts = (rollout(0, tokens=3, spans=first), rollout(1, tokens=2, spans=second))
    return Group(
        made.run, made.region, made.producer, 4, 0, made.prompt_token_ids, made.prompt_text, made.answer, rollouts
    )


def test_the_partition_is_that_of_the_newest_epoch_and_of_the_day_of_the_append():
    made = entry(two(spans((1, 9), (3, 4)), spans((2, 7))))
    assert partition_of(made, run="r", region="east") == Partition("r", 3, "2026-12-01", "east")


def test_rows_say_at_once_what_can_be_told():
    table = rows_of(entry(two(spans((1, 9), (3, 4)), spans((2, 7)))))
    assert table["seq"].to_pylist() == [380, 380]
    assert table["entry_id"].to_pylist() == ["1796103071764-3"] * 2
    assert table["epoch_min"].to_pylist() == [1, 2]
    assert (table["version_min"].to_pylist(), table["version_max"].to_pylist()) == ([4, 7], [9, 7])
    assert table["tokens"].to_pylist() == [3, 2]
    assert "region" not in table.column_names
    assert table["text"].to_pylist() == ["42", "42"]


@pytest.mark.parametrize("entry_id", ["0-0", "18446744073709551615-18446744073709551615", "253402300800000-0", "5"])
def test_whatever_id_somebody_chose_there_is_a_day_for_it(entry_id: str):
    made = partition_of(entry(group(), entry_id), run="r", region="east")
    assert parse_name(f"{made.folder}/{entry_id}_{entry_id}.parquet") is not None


@hypothesis.given(
    run=st.text(min_size=1, max_size=20), region=st.text(min_size=1, max_size=20), epoch=st.integers(0, 2**31 - 1)
)
def test_a_partition_has_a_name_that_is_read_back(run: str, region: str, epoch: int):
    hypothesis.assume(not any(0xD800 <= ord(c) < 0xE000 for c in run + region))
    made = partition_of(entry(two(spans((epoch, 0)), spans((0, 1)))), run=run, region=region)
    found = parse_name(f"{made.folder}/1-0_2-0.parquet")
    assert found is not None
    assert found.partition == made
