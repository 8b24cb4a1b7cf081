"""`anabranch ledger` over real servers: balance and audit while deliveries are in every place there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.consumers.fate_log import FateLog
from anabranch.producers.spool import Spool
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.redis_stream import RedisStream
from tests.fates import record
from tests.groups import entry

pytestmark = pytest.mark.process
P = "east-0-aa"
Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def ledger(valkey, keys, tmp_path: Path) -> Run:
    def run(*argv: str) -> subprocess.CompletedProcess:
        command = [
            sys.executable, "-I", "-m", "anabranch.cli.main", "ledger", *argv, "--set", f"run.name={keys.run}",
            "--set", f"run.dir={tmp_path}", "--set", f"hub.url={valkey.url}", "--set", f"regions.east.url={valkey.url}",
            "--set", "channel.connect_deadline_s=5",
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))

    return run


@pytest.fixture
def stream(client, keys, tmp_path: Path) -> RedisStream:
    """1 trained, 2 logged and not settled, 3 pending, 4 a dead letter, 5 not read, 6 in the spool only."""
    stream = RedisStream(client, keys)
    stream.append([entry(i, i, producer=P, run=keys.run) for i in range(1, 6)], floor=1)
    first, _, _, fourth = stream.read(LEARNER_GROUP, "c", max_entries=4, block_ms=0)
    log = FateLog(tmp_path / keys.run / "fates", file_lines=100)
    log.append([record(producer=P, seq=1, group_index=1), record(producer=P, seq=2, group_index=2)])
    log.close()
    stream.settle(LEARNER_GROUP, [(first.entry_id, "trained")])
    stream.dead_letter(LEARNER_GROUP, fourth, "unreadable")
    folder = tmp_path / keys.run / "spool" / "east" / "0"
    folder.mkdir(parents=True)
    spool = Spool(folder, SpoolSection(), producer=P)
    for index in range(1, 7):
        spool.append(index, b"x")
    spool.release(3)
    spool.close()
    return stream


def test_everything_is_in_its_place(stream: RedisStream, ledger: Run) -> None:
    done = ledger()
    assert done.returncode == 0, done.stderr
    assert "1  + trained" in done.stdout
    done = ledger("--audit", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(done.stdout)["east"]
    assert found == {"logged": 2, "settling": 1, "open": 2, "dead": 1, "spooled": 1, "wrong": []}


def test_what_is_nowhere_is_named(stream: RedisStream, ledger: Run, client, keys) -> None:
    client.delete(keys.dead_letters)
    client.hdel(keys.ledger, "dropped:dead_letter")
    client.hincrby(keys.ledger, "trained", 1)
    done = ledger("--audit")
    assert done.returncode == 1
    assert "the stream has counted 1 more fates than the log has" in done.stdout
    assert "nowhere" not in done.stdout, "the spool still has it"
    assert ledger().returncode == 0, "though the ledger balances"
