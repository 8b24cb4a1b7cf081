"""A run copied into a directory as its store, turn by turn, with a store that is away and kills in between."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.consumers import store_copier as copying
from anabranch.consumers.keeper import Keeper
from anabranch.consumers.recorded_files import all_files
from anabranch.consumers.run_mirror import mirror_run
from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.store_copier import StoreCopier, open_run_store
from anabranch.schemas.config import RecorderSection
from anabranch.schemas.errors import ConfigError, StreamUnavailableError
from tests.keeping import counted, fate_of, log_fates, once, record_step, write_groups
from tests.recorders import Clock
from tests.replay_runs import write_run


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "run" / "trajectories").mkdir(parents=True)
    return tmp_path / "runs" / "run"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Where the copy appears."""
    return tmp_path / "store" / "run"


def copier(run: Path, clock: Clock, *, now_s: float | None = None, **section: int) -> StoreCopier:
    url = f"file://{run.parent.parent}/store"
    store = open_run_store(url, directory=run, run="run", options={})
    wall_s = time.time if now_s is None else lambda: now_s
    return StoreCopier(run, store, RecorderSection(store=url, **section), run="run", clock=clock, wall_s=wall_s)


def keep(run: Path, clock: Clock) -> None:
    Keeper(run, RecorderSection(), naming=threading.Lock(), clock=clock).turn()


def settled(run: Path, *indices: int) -> None:
    for index in indices:
        write_groups(run, index)
    log_fates(run, *(fate_of(index, "dropped:age") for index in indices))
    Keeper(run, RecorderSection(merge_bytes=2**16), naming=threading.Lock())._settle()


def names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found if "aside" not in path.parts}


def test_a_copy_reads_as_the_run_does(tmp_path: Path, clock: Clock):
    run = write_run(tmp_path / "runs" / "run")
    (run / "redis").mkdir()
    (run / "redis" / "valkey.conf").write_text("requirepass hunter2")
    assert copier(run, clock).turn()
    assert names(tmp_path / "store/run") == {name for name in names(run) if not name.startswith("redis")}
    mirror = mirror_run(f"file://{tmp_path}/store/run", cache=tmp_path / "cache")
    seen = []
    for directory in (run, mirror):
        with RunReader(directory) as reader:
            seen.append(reader.rows("SELECT id, fate, weight, step FROM trajectories ORDER BY id"))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14


def test_files_wait_until_they_are_settled_or_old(run: Path, there: Path, clock: Clock):
    write_groups(run, 0)
    made = copier(run, clock)
    assert made.turn()
    assert counted(there) == Counter()
    old = copier(run, clock, now_s=time.time() + copying.UNSETTLED_S + 5)
    assert old.turn()
    assert counted(there) == once([0])
    log_fates(run, fate_of(0, "dropped:age"))
    keep(run, clock)
    assert old.turn()
    assert [path.read_bytes() for path in there.rglob("1000-0_*.parquet")] == [
        path.read_bytes() for path in run.rglob("1000-0_*.parquet")
    ]


def test_at_the_end_everything_is_copied(run: Path, there: Path, clock: Clock):
    write_groups(run, 0)
    copier(run, clock).close(alive=lambda: None, hurry=lambda: False)
    assert counted(there) == once([0])


def test_nothing_is_copied_twice_by_the_next_process_either(run: Path, clock: Clock):
    settled(run, 0, 1)
    record_step(run, 1)
    copier(run, clock).turn()
    again = copier(run, clock)
    assert again.turn()
    fates = (run / "fates/000001.jsonl").stat().st_size
    assert again.bytes_copied == fates, "the newest log alone, which may have grown"


def test_logs_end_with_a_whole_line_and_are_copied_now_and_then(run: Path, there: Path, clock: Clock):
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b'{"a": 1}\n{"b":')
    made = copier(run, clock)
    made.turn()
    assert (there / "metrics.jsonl").read_bytes() == b'{"a": 1}\n'
    metrics.write_bytes(b'{"a": 1}\n{"b": 2}\n')
    made.turn()
    assert (there / "metrics.jsonl").read_bytes() == b'{"a": 1}\n'
    clock.now_s += copying.LOG_S
    made.turn()
    assert (there / "metrics.jsonl").read_bytes() == metrics.read_bytes()


def test_a_line_longer_than_what_is_read_at_once(run: Path, there: Path, clock: Clock):
    (run / "metrics.jsonl").write_bytes(b"1\n" + b"x" * 200_000)
    (run / "versions.jsonl").write_bytes(b"y" * 200_000)
    copier(run, clock).turn()
    assert (there / "metrics.jsonl").read_bytes() == b"1\n"
    assert (there / "versions.jsonl").read_bytes() == b""


def test_a_large_file_goes_in_pieces(run: Path, there: Path, clock: Clock, monkeypatch):
    monkeypatch.setattr(copying, "PART_BYTES", 7)
    settled(run, 0)
    copier(run, clock).turn()
    assert counted(there) == once([0])


def test_a_turn_is_bounded(run: Path, there: Path, clock: Clock, monkeypatch):
    monkeypatch.setattr(copying, "TURN_BYTES", 1)
    settled(run, 0, 1, 2)
    made = copier(run, clock)
    assert [made.turn(), made.turn(), made.turn()] == [False, False, True]
    assert counted(there) == once(range(3))


def test_rows_count_once_in_the_store_while_files_are_merged(run: Path, there: Path, clock: Clock):
    made = copier(run, clock)
    settled(run, *range(4))
    made.turn()
    settled(run, *range(4, 8))
    keep(run, clock)
    made.turn()
    assert counted(there) == once(range(8))
    assert len(all_files(there / "trajectories")) == 5
    made.turn()
    clock.now_s += copying.GRACE_S
    made.turn()
    assert len(all_files(there / "trajectories")) == 1
    assert counted(there) == once(range(8))


def test_the_store_keeps_to_the_budget_and_tells_what_went(run: Path, there: Path, clock: Clock):
    settled(run, *range(6))
    size = next(run.rglob("1000-0_*.parquet")).stat().st_size
    copier(run, clock).turn()
    with capture_logs() as logs:
        tight = copier(run, clock, retain_bytes=2 * size + size // 2)
        assert tight.turn()
        assert tight.turn()
    assert counted(there) == once([4, 5])
    told = [log["record"] for log in logs if log["event"] == "dropped from the store for want of space"]
    assert len(told) == 4


def test_parts_do_not_count_again_when_their_merged_one_goes(run: Path, there: Path, clock: Clock):
    settled(run, *range(8))
    copier(run, clock).turn()
    keep(run, clock)
    copier(run, clock).turn()
    settled(run, 50)
    newest = next(run.rglob("1050-0_*.parquet")).stat().st_size
    copier(run, clock, retain_bytes=newest).turn()
    assert counted(there) == once([50])


def test_a_new_machine_drops_nothing_from_the_store(run: Path, there: Path, clock: Clock):
    settled(run, *range(3))
    copier(run, clock).turn()
    shutil.rmtree(run)
    (run / "trajectories").mkdir(parents=True)
    made = copier(run, clock)
    made.turn()
    clock.now_s += 10 * copying.GRACE_S
    made.turn()
    assert counted(there) == once(range(3))


def test_a_store_that_is_away_is_told_once_and_caught_up_with(run: Path, there: Path, clock: Clock, monkeypatch):
    settled(run, 0)
    made = copier(run, clock)
    put, lacks = made._store.put, [3]

    def away(path: str, content: bytes) -> None:
        if lacks[0]:
            lacks[0] -= 1
            raise StreamUnavailableError("the recorder's store does not answer")
        put(path, content)

    monkeypatch.setattr(made._store, "put", away)
    with capture_logs() as logs:
        assert [made.turn() for _ in range(4)] == [False, False, False, True]
    assert [log["event"] for log in logs] == [
        "the run is not copied to its store for now", "the run is copied to its store again",
    ]  # fmt: skip
    assert counted(there) == once([0])


def test_a_store_that_stays_away_holds_up_the_end_for_a_while_only(run: Path, clock: Clock, monkeypatch):
    made = copier(run, clock)
    monkeypatch.setattr(made, "_turn", lambda last: (_ for _ in ()).throw(StreamUnavailableError("away")))
    monkeypatch.setattr(copying.time, "sleep", lambda s: setattr(clock, "now_s", clock.now_s + 10))
    with capture_logs() as logs:
        made.close(alive=lambda: None, hurry=lambda: False)
    assert logs[-1]["event"].startswith("not all of the run is in its store")
    assert logs[-1]["error"] == "away"


def test_who_is_in_a_hurry_waits_for_one_turn(run: Path, there: Path, clock: Clock, monkeypatch):
    monkeypatch.setattr(copying, "TURN_BYTES", 1)
    settled(run, 0, 1)
    copier(run, clock).close(alive=lambda: None, hurry=lambda: True)
    assert counted(there) == once([0])


def test_whatever_it_dies_at_the_next_one_ends_the_copy(run: Path, there: Path, clock: Clock):
    """Between any two acts on the store: no file counts twice, no step counts without its values."""
    settled(run, *range(7))
    copier(run, clock).turn()
    settled(run, 7)
    keep(run, clock)
    record_step(run, 7)
    for acts in range(12):
        made = copier(run, clock)
        made._store = Dying(made._store, acts)  # type: ignore[assignment]
        try:
            made.turn()
            clock.now_s += copying.GRACE_S
            made.turn()
        except Killed:
            pass
        rows = counted(there)
        assert rows in (once(range(7)), once(range(8)))
        for facts in there.rglob("facts.json"):
            assert (facts.parent / "rank-0.parquet").is_file()
    assert counted(there) == once(range(8))
    assert len(all_files(there / "trajectories")) == 1


def test_its_thread_copies_and_ends(run: Path, there: Path, clock: Clock, monkeypatch):
    monkeypatch.setattr(copying, "TURN_S", 0.01)
    settled(run, 0)
    made = copier(run, clock)
    made.start()
    end = time.monotonic() + 30
    while not counted(there):
        assert time.monotonic() < end
        time.sleep(0.01)
    made.close(alive=lambda: None, hurry=lambda: False)
    assert made._thread is not None
    assert not made._thread.is_alive()
    assert counted(there) == once([0])


def test_a_store_over_the_run_directory_itself_is_refused(run: Path):
    with pytest.raises(ConfigError, match="a copy belongs elsewhere"):
        open_run_store(f"file://{run.parent}", directory=run, run="run", options={})


class Killed(BaseException):
    pass


class Dying:
    """A store that is the last thing a process speaks to after `left` acts."""

    def __init__(self, store: object, left: int) -> None:
        self._store, self._left = store, left

    def __getattr__(self, name: str):
        act = getattr(self._store, name)
        if name not in ("put", "delete"):
            return act

        def counted_act(*args: object) -> None:
            if self._left == 0:
                raise Killed
            self._left -= 1
            act(*args)

        return counted_act
