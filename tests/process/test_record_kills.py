"""kill -9 of a recorder at any moment: in the end every group of the stream stands once in the files, in its partition.

8 kills; ANABRANCH_RECORD_KILLS=50 for more (docs/results/replay has what came out).
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from anabranch.consumers.recorded_files import recorded_files
from anabranch.schemas.keys import RECORDER_GROUP, Keys
from anabranch.transport.boards import RunBoard
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry, group
from tests.process.test_record_command import command
from tests.streams import put

KILLS = int(os.environ.get("ANABRANCH_RECORD_KILLS", "8"))
GROUPS_PER_ROUND = 60


@pytest.mark.process
@pytest.mark.timeout(90 + 12 * KILLS)
def test_every_group_stands_once_in_the_files_after_kills(
    tmp_path: Path, valkey: EmbeddedValkey, client, keys: Keys, run_name: str
) -> None:
    stream = RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys)
    board: RunBoard = RedisRunBoard(client, keys)
    board.start()
    rng = random.Random(11)
    argv = command(
        tmp_path, run_name, hub__url=valkey.url, regions__east__url=valkey.url, stream__block_ms="20",
        recorder__rows_per_file="24", recorder__seconds_per_file="0.3",
    )  # fmt: skip
    root, appended = tmp_path / run_name / "trajectories", 0
    try:
        for round_ in range(KILLS):
            recorder = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            try:
                files = len(list(root.rglob("*.parquet")))
                for _ in range(GROUPS_PER_ROUND):
                    made = group(appended, epoch=1 + round_ // 3, run=run_name)
                    put(stream, entry(appended, run=run_name, rollouts=made.rollouts))
                    appended += 1
                end = time.monotonic() + 30
                while len(list(root.rglob("*.parquet"))) <= files:
                    assert time.monotonic() < end, "the recorder writes nothing"
                    assert recorder.poll() is None
                    time.sleep(0.002)
                time.sleep(rng.choice([0, rng.uniform(0, 0.02), rng.uniform(0, 0.4)]))
            finally:
                recorder.kill()
                recorder.wait()
        board.finish("all steps done")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        assert stream.ledger(RECORDER_GROUP).pending == 0
    finally:
        stream.close()
    rows: Counter[int] = Counter()
    for file in recorded_files(root):
        table = pq.read_table(file.path, partitioning=None)
        rows.update(table["group_index"].to_pylist())
        assert file.partition.epoch == 1 + min(table["group_index"].to_pylist()) // (3 * GROUPS_PER_ROUND)
    assert rows == Counter(dict.fromkeys(range(appended), 2)), "each group has two rollouts"
    assert not list(root.rglob("*.tmp"))
