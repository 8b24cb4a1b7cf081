"""kill -9 of a recorder whose files are settled, merged and copied all the time: rows count once, here and in the store, after every kill.

8 kills; ANABRANCH_KEEPER_KILLS=50 for more.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from anabranch.consumers.recorded_files import recorded_files
from anabranch.consumers.run_files import RunFiles
from anabranch.schemas.keys import RECORDER_GROUP, Keys
from anabranch.transport.boards import RunBoard
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry
from tests.keeping import fate_of, log_fates
from tests.process.test_record_command import command
from tests.streams import put

KILLS = int(os.environ.get("ANABRANCH_KEEPER_KILLS", "8"))
GROUPS_PER_ROUND = 40
# The recorder's own program, in a hurry: what it does within minutes falls within the second that it lives.
_HURRIED = """
import sys
from anabranch.consumers import keeper, store_copier
keeper.TURN_S, keeper.GRACE_S = 0.01, 0.05
store_copier.TURN_S, store_copier.GRACE_S, store_copier.LOG_S = 0.01, 0.1, 0.05
from anabranch.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def rows_in(root: Path) -> Counter[int]:
    """Sequence number of a group -> rows of it that count."""
    found: Counter[int] = Counter()
    for file in recorded_files(root / "trajectories"):
        found.update(pq.read_table(file.path, columns=["seq"], partitioning=None)["seq"].to_pylist())
    return found


@pytest.mark.process
@pytest.mark.timeout(90 + 12 * KILLS)
def test_rows_count_once_whatever_a_keeper_is_killed_at(
    tmp_path: Path, valkey: EmbeddedValkey, client, keys: Keys, run_name: str
) -> None:
    stream = RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys)
    board: RunBoard = RedisRunBoard(client, keys)
    board.start()
    rng = random.Random(5)
    plain = command(
        tmp_path / "runs", run_name, hub__url=valkey.url, regions__east__url=valkey.url, stream__block_ms="20",
        recorder__rows_per_file="4", recorder__seconds_per_file="0.1", recorder__store=f"file://{tmp_path}/store",
    )  # fmt: skip
    argv = [sys.executable, "-I", "-c", _HURRIED, *plain[plain.index("record") :]]
    run, store, appended, merged_at_kills = tmp_path / "runs" / run_name, tmp_path / "store" / run_name, 0, 0
    try:
        for _ in range(KILLS):
            recorder = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            try:
                fresh = range(appended, appended + GROUPS_PER_ROUND)
                for index in fresh:
                    put(stream, entry(index, run=run_name))
                log_fates(run, *(fate_of(index, "dropped:age") for index in fresh))
                appended = fresh.stop
                end = time.monotonic() + 30
                while rows_in(run)[rng.choice(fresh)] == 0:
                    assert time.monotonic() < end, "the recorder writes nothing"
                    assert recorder.poll() is None
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.5))
            finally:
                recorder.kill()
                recorder.wait()
            merged_at_kills += len(list(run.rglob("*.merged.parquet")))
            for where in (run, store):
                rows = rows_in(where)
                assert set(rows.values()) <= {2}, f"each group has two rollouts; {where}"
                assert rows.keys() <= set(range(appended))
        board.finish("all steps done")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        assert stream.ledger(RECORDER_GROUP).pending == 0
    finally:
        stream.close()
    once = Counter(dict.fromkeys(range(appended), 2))
    assert (rows_in(run), rows_in(store)) == (once, once)
    assert all(part.settled for part in RunFiles(run).trajectories())
    assert merged_at_kills, "no kill found merged files"
    assert not list(run.rglob("*.tmp"))
    assert (store / "fates/000001.jsonl").read_bytes() == (run / "fates/000001.jsonl").read_bytes()
