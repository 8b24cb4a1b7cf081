"""Files that come, are written over, are merged and go while somebody reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import TrajectoryError
from tests.replay_runs import GROUPS, Made, changed, write_fates, write_partitioned, write_run, write_steps

WEST = [one for one in GROUPS if one.region == "west" and one.index in (3, 5)]
COUNT = "SELECT count(*) AS n, count(fate) AS fates, count(weight) AS weights FROM trajectories"


def counted(reader: RunReader) -> tuple[int, int, int]:
    (row,) = reader.rows(COUNT)
    return row["n"], row["fates"], row["weights"]


def test_each_query_sees_what_is_there_then(tmp_path: Path) -> None:
    one, other = WEST
    write_partitioned(tmp_path, [one], joined=False)
    with RunReader(tmp_path) as reader:
        assert counted(reader) == (2, 0, 0)
        write_fates(tmp_path, [one])
        assert counted(reader) == (2, 2, 0)
        write_steps(tmp_path, [one])
        assert counted(reader) == (2, 2, 2)
        write_partitioned(tmp_path, [one], joined=True)  # in place, as the recorder joins
        assert reader.rows("SELECT DISTINCT weight FROM trajectories") == [{"weight": 0.125}]
        second = write_partitioned(tmp_path, [other], joined=True)
        assert counted(reader) == (4, 4, 4)
        write_partitioned(tmp_path, WEST, joined=True, merged=True)  # its parts are still there
        assert counted(reader) == (4, 4, 4)
        second.unlink()
        assert counted(reader) == (4, 4, 4)


def test_a_fate_log_that_grows_or_is_replaced(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert reader.rows("SELECT count(*) AS n FROM fates") == [{"n": 6}]
        path = tmp_path / "run" / "fates" / "000001.jsonl"
        path.write_bytes(
            path.read_bytes().rpartition(b"\n")[0] + b"\n" + changed(GROUPS[4], fate="trained").record().line()
        )
        assert reader.rows("SELECT count(*) AS n FROM fates") == [{"n": 7}]
        path.unlink()
        write_fates(tmp_path / "run", GROUPS[:2])
        assert reader.rows("SELECT count(*) AS n FROM fates") == [{"n": 2}]


def test_a_run_that_is_being_written_never_fails_nor_counts_twice(tmp_path: Path) -> None:
    groups: list[Made] = [changed(WEST[0], seq=10 + i, index=10 + i) for i in range(30)]
    write_partitioned(tmp_path, groups[:1], joined=False)
    done = threading.Event()

    def record() -> None:
        for count in range(2, len(groups) + 1):
            part = write_partitioned(tmp_path, groups[count - 1 : count], joined=count % 2 == 0)
            whole = write_partitioned(tmp_path, groups[:count], joined=False, merged=True)
            for path in part.parent.glob("*.parquet"):
                if path != whole:
                    path.unlink()
        done.set()

    thread = threading.Thread(target=record)
    thread.start()
    seen = []
    with RunReader(tmp_path) as reader:
        while not done.is_set():
            (row,) = reader.rows(
                "SELECT count(*) AS n, count(DISTINCT id) AS ids, sum(len(text)) AS size FROM trajectories"
            )
            assert row["n"] == row["ids"]
            seen.append(row["n"])
        thread.join(10)
        assert reader.rows("SELECT count(*) AS n FROM trajectories") == [{"n": 60}]
    assert seen == sorted(seen)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_partitioned(tmp_path, WEST, joined=True)
    with RunReader(tmp_path) as reader:
        assert counted(reader)[0] == 4
        path.write_bytes(path.read_bytes()[:-200])  # not as the recorder writes
        with pytest.raises(TrajectoryError, match=path.name):
            counted(reader)
