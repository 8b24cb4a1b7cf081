"""What is joined to a recorded file, and when."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.consumers.fate_follower import FateFollower
from anabranch.consumers.run_files import RunFiles
from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.settling import STEP_PATIENCE_MS, StepRows, names_in, settle
from tests.keeping import fate_of, log_fates, record_step, rows_that_count, write_groups
from tests.limits import file_size_limit


def settled(run: Path, file, *, now_ms: int = 2) -> bool:
    fates = FateFollower(run).find(names_in(file))
    return settle(file, fates, StepRows(run), now_ms=now_ms)


def test_a_row_gets_its_fate_and_what_its_step_made_of_it(tmp_path: Path):
    file = write_groups(tmp_path, 8, 9)
    log_fates(tmp_path, fate_of(8), fate_of(9, "dropped:age"))
    record_step(tmp_path, 8)
    assert settled(tmp_path, file)
    trained, _, aged, _ = rows_that_count(tmp_path)
    assert (trained["fate"], trained["step"], trained["train_epoch"], trained["train_version"]) == ("trained", 4, 1, 3)
    assert (trained["weight"], trained["learner_logprobs"], trained["kept"]) == (0.25, [-0.5, -1.0], [True, False])
    assert trained["factor"] == [1.0, None]
    assert (aged["fate"], aged["age"], aged["step"], aged["weight"], aged["kept"]) == (
        "dropped:age",
        1,
        None,
        None,
        None,
    )
    assert RunFiles(tmp_path).trajectories()[0].settled


def test_the_rows_are_those_that_were_there_in_their_order(tmp_path: Path):
    file = write_groups(tmp_path, 3, 1, 2)
    before = pq.read_table(file.path, partitioning=None)
    log_fates(tmp_path, *(fate_of(i, "dropped:surplus") for i in (1, 2, 3)))
    assert settled(tmp_path, file)
    after = pq.read_table(file.path, partitioning=None)
    assert after.select(before.column_names).equals(before)


def test_what_every_reader_joins_is_what_is_joined_here(tmp_path: Path):
    file = write_groups(tmp_path, 8, 9)
    log_fates(tmp_path, fate_of(8), fate_of(9, "dropped:zero_variance"))
    record_step(tmp_path, 8, 9)
    query = "SELECT * FROM trajectories ORDER BY seq, sample_index"
    with RunReader(tmp_path) as reader:
        expected = reader.query(query)
    assert settled(tmp_path, file)
    with RunReader(tmp_path) as reader:
        assert reader.query(query).equals(expected)


@pytest.mark.parametrize("what", ["no fate", "no step yet"])
def test_nothing_is_written_before_all_is_known(tmp_path: Path, what: str):
    file = write_groups(tmp_path, 8, 9)
    before = file.path.read_bytes()
    log_fates(tmp_path, fate_of(8), *([] if what == "no fate" else [fate_of(9, version=7)]))
    record_step(tmp_path, 8)
    assert not settled(tmp_path, file)
    assert file.path.read_bytes() == before


def test_a_step_that_left_no_record_is_not_waited_for_for_ever(tmp_path: Path):
    file = write_groups(tmp_path, 8)
    log_fates(tmp_path, fate_of(8))
    assert not settled(tmp_path, file, now_ms=STEP_PATIENCE_MS)
    assert settled(tmp_path, file, now_ms=STEP_PATIENCE_MS + 1)
    assert [r["weight"] for r in rows_that_count(tmp_path)] == [None, None]


def test_the_step_that_the_fate_names_counts_and_no_other(tmp_path: Path):
    """Epoch 1 trained on it too, and its step was given up."""
    file = write_groups(tmp_path, 8)
    record_step(tmp_path, 8, epoch=1, weight=0.5)
    record_step(tmp_path, 8, epoch=2, weight=0.125)
    log_fates(tmp_path, fate_of(8, epoch=2))
    assert settled(tmp_path, file)
    assert {r["weight"] for r in rows_that_count(tmp_path)} == {0.125}


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path):
    file = write_groups(tmp_path, *range(40))
    before = file.path.read_bytes()
    log_fates(tmp_path, *(fate_of(i, "dropped:age") for i in range(40)))
    with file_size_limit(1000), pytest.raises(OSError, match="too large"):
        settled(tmp_path, file)
    assert file.path.read_bytes() == before
    assert [p.name for p in file.path.parent.iterdir()] == [file.path.name]


def test_settling_twice_is_settling_once(tmp_path: Path):
    file = write_groups(tmp_path, 8)
    log_fates(tmp_path, fate_of(8))
    record_step(tmp_path, 8)
    assert settled(tmp_path, file)
    once = pq.read_table(file.path, partitioning=None)
    assert settled(tmp_path, file)
    assert isinstance(once, pa.Table)
    assert pq.read_table(file.path, partitioning=None).equals(once)
