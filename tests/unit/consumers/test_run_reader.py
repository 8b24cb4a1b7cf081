"""A run as tables: all of it, bounded, and changed in nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.consumers.run_reader import VIEWS, RunReader
from anabranch.schemas.errors import UsageError
from anabranch.transport.memory_world import MemoryWorld
from tests.groups import entry
from tests.replay_runs import HOSTILE, write_run
from tests.streams import put


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.rglob("*") if p.is_file()}


def test_every_view_is_there_and_nothing_of_the_run_changes(run: Path) -> None:
    before = contents(run)
    with RunReader(run) as reader:
        counts = {name: reader.rows(f"SELECT count(*) AS n FROM {name}")[0]["n"] for name in VIEWS}
    assert counts == {
        "trajectories": 14, "fates": 6, "steps": 0, "evaluations": 1, "notes": 1, "versions": 3, "rollouts": 8, "facts": 2,
    }  # fmt: skip
    assert contents(run) == before


def test_hostile_text_is_data(run: Path) -> None:
    with RunReader(run) as reader:
        rows = reader.rows("SELECT text FROM trajectories WHERE contains(text, ?) ORDER BY id", [HOSTILE])
        assert [row["text"] for row in rows] == [f"{HOSTILE}0", f"{HOSTILE}1"]
        assert reader.rows("SELECT count(*) AS n FROM trajectories")[0]["n"] == 14


def test_what_duckdb_refuses_is_the_users_mistake(run: Path) -> None:
    with RunReader(run) as reader, pytest.raises(UsageError, match="nope"):
        reader.query("SELECT nope FROM trajectories")


def test_a_query_in_little_memory_spills_into_a_folder_that_goes(run: Path) -> None:
    reader = RunReader(run, memory_bytes=64 * 2**20, threads=1)
    spill = reader._spill
    rows = reader.rows("SELECT count(DISTINCT a.range * 1000003 % 999983) AS n FROM range(3000000) a")
    assert rows[0]["n"] > 900_000
    assert spill.is_dir()
    reader.close()
    assert not spill.exists()


def test_batches_come_some_rows_at_a_time(run: Path) -> None:
    with RunReader(run) as reader, reader.batches("SELECT id FROM trajectories ORDER BY id", batch_rows=5) as batches:
        sizes = [batch.num_rows for batch in batches]
    assert sum(sizes) == 14


def test_streams_alone_are_a_run_too_and_no_group_learns_of_it(tmp_path: Path) -> None:
    world = MemoryWorld("run", ["east", "west"])
    put(world.stream("east"), entry(0, 1), entry(1, 2))
    with RunReader(None, streams=world.streams()) as reader:
        rows = reader.rows("SELECT id, fate, text FROM trajectories ORDER BY id")
        assert [row["id"] for row in rows] == ["east/p/1/0", "east/p/1/1", "east/p/2/0", "east/p/2/1"]
        assert {row["fate"] for row in rows} == {None}
        put(world.stream("west"), entry(2, 1, region="west"))
        assert reader.rows("SELECT count(*) AS n FROM trajectories")[0]["n"] == 6
    assert world.stream("east").state().groups == ()


def test_what_is_recorded_is_not_counted_again_from_a_stream(run: Path) -> None:
    world = MemoryWorld("run", ["east"])
    put(world.stream("east"), entry(0, 1, producer="east-0-ab"), entry(9, 9, producer="east-0-ab"))
    with RunReader(run, streams=world.streams()) as reader:
        rows = reader.rows("SELECT id, fate FROM trajectories WHERE seq IN (1, 9) AND region = 'east' ORDER BY id")
    assert [(row["id"], row["fate"]) for row in rows] == [
        ("east/east-0-ab/1/0", "trained"), ("east/east-0-ab/1/1", "trained"),
        ("east/east-0-ab/9/0", None), ("east/east-0-ab/9/1", None),
    ]  # fmt: skip


def test_lines_of_metrics_and_facts_are_columns(run: Path) -> None:
    with RunReader(run) as reader:
        (note,) = reader.rows("SELECT what, detail->>'steps' AS steps FROM notes")
        assert note == {"what": "started", "steps": "2"}
        (evaluation,) = reader.rows("SELECT mean_reward FROM evaluations")
        assert evaluation == {"mean_reward": 0.5}
        steps = reader.rows("SELECT epoch, step, now, loss_bits FROM facts ORDER BY step")
    assert [(s["epoch"], s["step"], s["now"]) for s in steps] == [(1, 1, "e1.v0"), (2, 2, "e2.v1")]
    assert float.fromhex(steps[0]["loss_bits"]) == 0.1


def test_a_reader_leaves_no_descriptor_open(run: Path) -> None:
    with RunReader(run) as reader:
        reader.rows("SELECT count(*) AS n FROM trajectories")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with RunReader(run) as reader:
            reader.rows("SELECT sum(reward) AS n FROM trajectories")
    assert len(os.listdir("/proc/self/fd")) <= before
