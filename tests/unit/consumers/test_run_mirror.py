"""A run in an object store, mirrored: whole files, once, and gone when they go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from anabranch.consumers.run_mirror import cache_directory, mirror_run
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import ConfigError, UsageError
from tests.replay_runs import write_run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "store")
    (run / "redis").mkdir()
    (run / "redis" / "valkey.conf").write_text("requirepass hunter2")
    return run


def test_a_mirror_reads_as_the_run_does(store: Path, tmp_path: Path) -> None:
    mirror = mirror_run(f"file://{store}", cache=tmp_path / "cache")
    counts = []
    for directory in (store, mirror):
        with RunReader(directory) as reader:
            counts.append(reader.rows("SELECT count(*) AS n, count(weight) AS w, count(fate) AS f FROM trajectories"))
    assert counts[0] == counts[1] == [{"n": 14, "w": 6, "f": 12}]
    assert not (mirror / "redis").exists(), "only what is a run's"


def test_only_what_is_new_is_fetched_and_what_went_goes(store: Path, tmp_path: Path) -> None:
    mirror = mirror_run(f"file://{store}", cache=tmp_path / "cache")
    inodes = {p: p.stat().st_ino for p in mirror.rglob("*") if p.is_file()}
    (store / "versions.jsonl").write_bytes((store / "versions.jsonl").read_bytes() * 2)
    shutil.rmtree(store / "trajectories" / "region=west")
    assert mirror_run(f"file://{store}", cache=tmp_path / "cache") == mirror
    changed = {p.name for p, inode in inodes.items() if p.exists() and p.stat().st_ino != inode}
    assert changed == {"versions.jsonl"}
    assert not list(mirror.glob("trajectories/region=west/*"))


def test_a_store_without_a_run_or_a_url_of_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no recorded run"):
        mirror_run(f"file://{tmp_path}/empty", cache=tmp_path / "cache")
    with pytest.raises(ConfigError):
        mirror_run("nonsense://x", cache=tmp_path / "cache")


def test_each_url_has_its_own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("s3://a/b") == cache_directory("s3://a/b/")
    assert cache_directory("s3://a/b") != cache_directory("s3://a/c")
    assert cache_directory("s3://a/b").is_relative_to(tmp_path)
