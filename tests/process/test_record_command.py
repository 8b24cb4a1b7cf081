"""`anabranch record` over real servers: when it ends, and with what."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from anabranch.consumers.recorder import CONSUMER
from anabranch.schemas.keys import RECORDER_GROUP, Keys
from anabranch.transport.boards import RunBoard
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry
from tests.recorders import on_disk
from tests.streams import put

pytestmark = pytest.mark.process


@pytest.fixture
def board(client, keys: Keys) -> RunBoard:
    return RedisRunBoard(client, keys)


@pytest.fixture
def streams(valkey: EmbeddedValkey, keys: Keys) -> Iterator[RedisStream]:
    stream = RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys)
    yield stream
    stream.close()


def command(directory: Path, run_name: str, **settings: str) -> list[str]:
    return [
        sys.executable, "-I", "-m", "anabranch.cli.main", "record", f"--set=run.name={run_name}",
        f"--set=run.dir={directory}", *(f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()),
    ]  # fmt: skip


def test_the_command_ends_when_the_run_is_finished_and_everything_is_written(
    tmp_path: Path, valkey: EmbeddedValkey, streams: RedisStream, board: RunBoard, run_name: str
) -> None:
    for index in range(200):
        put(streams, entry(index, run=run_name))
    board.start()
    board.finish("all steps done")
    argv = command(tmp_path, run_name, hub__url=valkey.url, regions__east__url=valkey.url, stream__block_ms="20")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert on_disk(tmp_path / run_name / "trajectories", "east") == list(range(200))
    assert streams.ledger(RECORDER_GROUP).pending == 0
    assert valkey.password not in done.stderr


def test_the_command_gives_up_with_75_when_a_region_dies_before_all_is_written(
    tmp_path: Path, valkey: EmbeddedValkey, board: RunBoard, keys: Keys, run_name: str
) -> None:
    board.start()
    with EmbeddedValkey(tmp_path / "region", fsync="everysec") as region:
        argv = command(
            tmp_path, run_name, hub__url=valkey.url, regions__east__url=region.url, stream__block_ms="20",
            channel__connect_deadline_s="1.5",
        )  # fmt: skip
        link = connect(region.url, deadline_s=10, what="the test Valkey")
        put(RedisStream(link, keys), entry(0, run=run_name))
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        try:
            end = time.monotonic() + 30
            while not handed_out(link, keys):
                assert time.monotonic() < end, "the recorder never read"
                time.sleep(0.05)
            link.close()
            region.kill()
            board.finish("all steps done")
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 75, errors
    assert "waiting for the last entries of east" in errors
    assert region.password not in errors


def handed_out(link: redis.Redis, keys: Keys) -> bool:
    """Whether the recorder holds an entry."""
    with contextlib.suppress(redis.ResponseError):  # its group is not there yet
        return bool(link.xpending_range(keys.trajectories, RECORDER_GROUP, "-", "+", 1, consumername=CONSUMER))
    return False
