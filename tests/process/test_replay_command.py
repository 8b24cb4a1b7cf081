"""`anabranch replay` over real servers: streams alone, a run that is being recorded, and what the recorder left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.schemas.keys import RECORDER_GROUP, Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry
from tests.streams import put

pytestmark = pytest.mark.process


def test_a_run_is_read_from_its_streams_then_from_its_records(
    tmp_path: Path, valkey: EmbeddedValkey, client, keys: Keys, run_name: str
) -> None:
    settings = [
        f"--set=run.name={run_name}", f"--set=run.dir={tmp_path}", f"--set=hub.url={valkey.url}",
        f"--set=regions.east.url={valkey.url}", "--set=stream.block_ms=20", "--set=channel.connect_deadline_s=5",
    ]  # fmt: skip

    def anabranch(*argv: str) -> str:
        command = [sys.executable, "-I", "-m", "anabranch.cli.main", *argv, *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert valkey.password not in done.stdout + done.stderr
        return done.stdout

    def ids(*argv: str) -> list[str]:
        lines = anabranch("replay", "ls", "--json", "--sort", "group_index", *argv).splitlines()
        return [json.loads(line)["id"] for line in lines]

    stream = RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys)
    put(stream, *(entry(index, run=run_name) for index in range(3)))
    board = RedisRunBoard(client, keys)
    board.start()
    board.finish("all steps done")
    expected = [f"east/p/{seq}/{sample}" for seq in range(3) for sample in range(2)]
    assert ids() == expected
    assert stream.state().groups == (), "whoever looks is no reader"
    anabranch("record")
    put(stream, entry(3, run=run_name))
    assert ids() == expected, "the run directory, now that there is one"
    assert ids("--streams") == [*expected, "east/p/3/0", "east/p/3/1"]
    assert [group.name for group in stream.state().groups] == [RECORDER_GROUP]
    life = json.loads(anabranch("replay", "why", "p/2/1", "--json"))
    assert life["fate"] is None
    stream.close()
