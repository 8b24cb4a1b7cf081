"""The keeper's turns over a run directory, and beside a recorder and a reader."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.consumers.keeper import GRACE_S, LOOK_BACK_S, Keeper
from anabranch.consumers.recorded_files import all_files, recorded_files
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.config import RecorderSection
from tests.keeping import counted, fate_of, log_fates, once, record_step, rows_that_count, write_groups
from tests.limits import file_size_limit
from tests.recorders import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keeper(run: Path, clock: Clock, **section: int) -> Keeper:
    made = RecorderSection(**section)
    return Keeper(run, made, naming=threading.Lock(), clock=clock, now_ms=lambda: int(clock.now_s * 1000))


def settled_files(run: Path, count: int) -> None:
    for index in range(count):
        write_groups(run, index)
    log_fates(run, *(fate_of(index, "dropped:age") for index in range(count)))


def test_files_are_settled_then_merged_and_their_parts_go_after_a_while(tmp_path: Path, clock: Clock):
    for index in range(10):
        write_groups(tmp_path, index)
    made = keeper(tmp_path, clock)
    made.turn()
    assert [r.get("fate") for r in rows_that_count(tmp_path)] == [None] * 20
    log_fates(tmp_path, *(fate_of(index) for index in range(10)))
    record_step(tmp_path, *range(10))
    made.turn()
    assert {r["weight"] for r in rows_that_count(tmp_path)} == {0.25}
    assert counted(tmp_path) == once(range(10))
    assert len(recorded_files(tmp_path / "trajectories")) == 1
    assert len(all_files(tmp_path / "trajectories")) == 11
    clock.now_s += GRACE_S
    made.turn()
    assert len(all_files(tmp_path / "trajectories")) == 1
    assert counted(tmp_path) == once(range(10))


def test_what_a_keeper_left_when_it_died_is_removed_by_the_next(tmp_path: Path, clock: Clock):
    settled_files(tmp_path, 8)
    keeper(tmp_path, clock).turn()
    again = keeper(tmp_path, clock)
    again.turn()
    assert len(all_files(tmp_path / "trajectories")) == 9
    clock.now_s += GRACE_S
    again.turn()
    assert len(all_files(tmp_path / "trajectories")) == 1


def test_at_the_end_nothing_is_left_to_do(tmp_path: Path, clock: Clock):
    made = keeper(tmp_path, clock)
    settled_files(tmp_path, 9)
    made.close()
    assert len(all_files(tmp_path / "trajectories")) == 1
    assert counted(tmp_path) == once(range(9))


def test_a_group_whose_fate_is_old_news_is_settled_after_looking_back(tmp_path: Path, clock: Clock, monkeypatch):
    monkeypatch.setattr("anabranch.consumers.fate_follower.RECENT_ROWS", 1)
    made = keeper(tmp_path, clock)
    write_groups(tmp_path, 100)
    log_fates(tmp_path, fate_of(0, "dropped:age"))
    made.turn()
    log_fates(tmp_path, fate_of(1, "dropped:age"))
    made.turn()
    write_groups(tmp_path, 0)
    made.turn()
    assert [r.get("fate") for r in rows_that_count(tmp_path) if r["seq"] == 0] == [None, None]
    clock.now_s += LOOK_BACK_S
    made.turn()
    assert [r["fate"] for r in rows_that_count(tmp_path) if r["seq"] == 0] == ["dropped:age"] * 2


def test_too_much_is_dropped_oldest_first_and_told(tmp_path: Path, clock: Clock):
    settled_files(tmp_path, 4)
    record_step(tmp_path, 3)
    size = recorded_files(tmp_path / "trajectories")[0].path.stat().st_size
    made = keeper(tmp_path, clock, retain_bytes=2 * size + size // 2)
    with capture_logs() as logs:
        made.turn()
    left = sorted({seq for seq, _ in counted(tmp_path)})
    assert left[-1] == 3
    assert 1 <= len(left) < 4
    assert left == list(range(4 - len(left), 4))
    assert next(log["event"] for log in logs if log["log_level"] == "info") == "dropped for want of space"


def test_parts_do_not_count_again_when_the_merged_one_is_dropped(tmp_path: Path, clock: Clock):
    settled_files(tmp_path, 8)
    made = keeper(tmp_path, clock)
    made.turn()
    write_groups(tmp_path, 50)
    newest = recorded_files(tmp_path / "trajectories")[-1].path.stat().st_size
    tight = keeper(tmp_path, clock, retain_bytes=newest)
    tight.turn()
    assert counted(tmp_path) == once([50])


def test_a_full_disk_is_told_once_and_what_it_kept_from_being_done_is_done_later(tmp_path: Path, clock: Clock):
    for index in range(3):
        write_groups(tmp_path, *range(100 * index, 100 * index + 40))
    log_fates(tmp_path, *(fate_of(100 * i + k, "dropped:age") for i in range(3) for k in range(40)))
    made = keeper(tmp_path, clock)
    with capture_logs() as logs, file_size_limit(1500):
        made.turn()
        made.turn()
    assert [log["event"] for log in logs] == ["recorded files are left as they are for now"]
    made.turn()
    assert {r["fate"] for r in rows_that_count(tmp_path)} == {"dropped:age"}


def test_what_cannot_be_settled_keeps_nothing_from_being_dropped(tmp_path: Path, clock: Clock):
    settled_files(tmp_path, 3)
    write_groups(tmp_path, 50)
    newest = recorded_files(tmp_path / "trajectories")[-1].path
    recorded_files(tmp_path / "trajectories")[0].path.write_bytes(b"PAR1")
    with capture_logs() as logs:
        keeper(tmp_path, clock, retain_bytes=newest.stat().st_size).turn()
    assert [log["event"] for log in logs][:3] == ["dropped for want of space"] * 3
    assert counted(tmp_path) == once([50])


def test_a_damaged_file_stops_neither_thread_nor_recorder(tmp_path: Path, clock: Clock):
    settled_files(tmp_path, 2)
    (tmp_path / "trajectories/run=run/epoch=1/day=1970-01-01/region=east/1-0_2-0.parquet").write_bytes(b"PAR1")
    with capture_logs() as logs:
        keeper(tmp_path, clock).turn()
    assert "cannot be read" in logs[0]["error"]


def test_a_reader_sees_every_row_once_while_files_are_settled_merged_and_removed(tmp_path: Path, clock: Clock):
    done = threading.Event()
    seen: list[dict[str, int]] = []
    write_groups(tmp_path, 0)

    def read() -> None:
        with RunReader(tmp_path) as reader:
            while not done.is_set():
                seen.extend(reader.rows("SELECT count(*) AS n, count(DISTINCT id) AS ids FROM trajectories"))

    thread = threading.Thread(target=read)
    thread.start()
    made = keeper(tmp_path, clock)
    try:
        for index in range(1, 60):
            write_groups(tmp_path, index)
            log_fates(tmp_path, fate_of(index - 1, "dropped:age"))
            clock.now_s += 5
            made.turn(last=index % 20 == 0)
    finally:
        done.set()
        thread.join(60)
    assert len(seen) > 2
    assert all(row["n"] == row["ids"] for row in seen)
    assert [row["n"] for row in seen] == sorted(row["n"] for row in seen)
    assert counted(tmp_path) == once(range(60))
