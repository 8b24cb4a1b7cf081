"""A recorded run in a real object store (an S3 server): copied there, read from there, merged and dropped there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.consumers import store_copier as copying
from anabranch.consumers.keeper import Keeper
from anabranch.consumers.recorded_files import all_files
from anabranch.consumers.run_mirror import mirror_run
from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.store_copier import StoreCopier, open_run_store
from anabranch.schemas.config import RecorderSection
from tests.contract.s3_server import BUCKET, S3Server
from tests.keeping import counted, fate_of, log_fates, once, record_step, write_groups
from tests.recorders import Clock


@pytest.fixture
def url(run_name: str) -> str:
    return f"s3://{BUCKET}/{run_name}"


def copier(run: Path, s3: S3Server, url: str, clock: Clock, **section: int) -> StoreCopier:
    store = open_run_store(url, directory=run, run="run", options=s3.options())
    return StoreCopier(run, store, RecorderSection(store=url, **section), run="run", clock=clock)


def read(s3: S3Server, url: str, cache: Path) -> Path:
    return mirror_run(f"{url}/run", options=s3.options(), cache=cache)


def test_a_run_is_copied_and_read_from_its_store(tmp_path: Path, s3: S3Server, url: str):
    run, clock = tmp_path / "run", Clock()
    keeper = Keeper(run, RecorderSection(), naming=threading.Lock(), clock=clock)
    for index in range(9):
        write_groups(run, index)
    log_fates(run, *(fate_of(index) for index in range(8)))
    record_step(run, *range(9))
    keeper._settle()
    made = copier(run, s3, url, clock)
    assert made.turn()
    mirror = read(s3, url, tmp_path / "cache")
    assert counted(mirror) == once(range(8)), "the last one has no fate yet"
    with RunReader(mirror) as reader:
        assert reader.rows("SELECT count(*) AS n, min(weight) AS w FROM trajectories") == [{"n": 16, "w": 0.25}]
    log_fates(run, fate_of(8, "dropped:age"))
    keeper.turn()
    made.turn()
    assert counted(read(s3, url, tmp_path / "cache")) == once(range(9))
    made.turn()
    clock.now_s += copying.GRACE_S
    made.turn()
    assert counted(read(s3, url, tmp_path / "cache")) == once(range(9))
    assert len(all_files(tmp_path / "cache/trajectories")) == 1, "one file, merged of nine"


def test_a_large_file_goes_up_in_parts(tmp_path: Path, s3: S3Server, url: str, monkeypatch):
    run, clock = tmp_path / "run", Clock()
    (run / "trajectories").mkdir(parents=True)
    lines = b'{"x": "' + b"y" * 100 + b'"}\n'
    (run / "metrics.jsonl").write_bytes(lines * (9 * 2**20 // len(lines)) + b"torn")
    monkeypatch.setattr(copying, "PART_BYTES", 2**20)
    assert copier(run, s3, url, clock).turn()
    there = read(s3, url, tmp_path / "cache") / "metrics.jsonl"
    assert there.read_bytes() == (run / "metrics.jsonl").read_bytes().removesuffix(b"torn")


def test_the_oldest_are_dropped_beyond_the_budget(tmp_path: Path, s3: S3Server, url: str):
    run, clock = tmp_path / "run", Clock()
    for index in range(5):
        write_groups(run, index)
    log_fates(run, *(fate_of(index, "dropped:age") for index in range(5)))
    Keeper(run, RecorderSection(), naming=threading.Lock(), clock=clock)._settle()
    size = next(run.rglob("1000-0_*.parquet")).stat().st_size
    copier(run, s3, url, clock).turn()
    assert copier(run, s3, url, clock, retain_bytes=3 * size).turn()
    left = sorted({seq for seq, _ in counted(read(s3, url, tmp_path / "cache"))})
    assert left
    assert left == list(range(5 - len(left), 5))
    assert len(left) < 5
