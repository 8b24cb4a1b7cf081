from __future__ import annotations

from pathlib import Path

from anabranch.deploy.chaos.log_sizes import LogSizes, newest_log


def write(folder: Path, number: int, size: int) -> Path:
    path = folder / "appendonlydir" / f"appendonly.aof.{number}.incr.aof"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_what_came_after_the_moment_is_cut_off(tmp_path: Path) -> None:
    sizes = LogSizes({"redis-east": tmp_path})
    sizes.look(0.0)
    for now, size in [(1.0, 10), (1.4, 20), (2.0, 30), (2.4, 30)]:
        path = write(tmp_path, 3, size)
        sizes.look(now)
    write(tmp_path, 3, 45)
    assert sizes.cut("redis-east", since=1.5) == 25
    assert path.stat().st_size == 20
    assert sizes.cut("redis-east", since=3.0) == 0


def test_a_file_that_is_younger_than_the_moment_keeps_what_it_had_at_the_first_look(tmp_path: Path) -> None:
    sizes = LogSizes({"redis-east": tmp_path})
    write(tmp_path, 1, 100)
    sizes.look(1.0)
    path = write(tmp_path, 2, 40)
    assert sizes.cut("redis-east", since=0.5) == 0, "nobody has looked at this one"
    sizes.look(2.0)
    write(tmp_path, 2, 60)
    assert sizes.cut("redis-east", since=0.5) == 20
    assert path.stat().st_size == 40


def test_the_newest_by_number_and_no_file_at_all(tmp_path: Path) -> None:
    assert newest_log(tmp_path) is None
    assert LogSizes({"a": tmp_path}).cut("a", since=0.0) == 0
    write(tmp_path, 9, 1)
    newest = write(tmp_path, 10, 2)
    assert newest_log(tmp_path) == (newest, 2)
