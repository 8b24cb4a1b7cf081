"""`anabranch bench delivery` measures what it says: both ways, every payload, ours and the others' on one server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.main import main
from anabranch.deploy import delivery_load, delivery_peers
from anabranch.deploy.bench_delivery import fresh_server, measure_bytes, measure_rollouts
from anabranch.deploy.delivery_load import Ours, WriterProcess, make_groups, payload_of
from anabranch.deploy.delivery_peers import OneByOne, RedisBenchmark, messages
from anabranch.deploy.delivery_rows import BytesRow, RolloutsRow, bytes_table, rollouts_table
from anabranch.schemas.errors import DeadlineError, TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import decode_group, encode_group
from anabranch.transport.redis_stream import RedisStream

pytestmark = pytest.mark.process
JSON = (lambda message: json.dumps(message).encode(), json.loads)
with_benchmark = pytest.mark.skipif(
    not RedisBenchmark.is_here(), reason="redis-benchmark (redis-tools) is not installed"
)


@with_benchmark
def test_every_row_and_column(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kb", "16", "--persistence", "everysec", "--megabytes", "1", "--rollouts", "16", "--rounds", "2"]
    assert main(["bench", "delivery", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["server"]
    (row,) = told["bytes"]
    assert row.keys() == {*BytesRow.__slots__, "kept"}
    assert (row["persistence"], row["entries"], row["rounds"]) == ("everysec", 10**6 // row["entry_bytes"], 2)
    assert row["entry_bytes"] == pytest.approx(16 * 1024, rel=0.01)
    assert all(row[name] > 0 for name in BytesRow.__slots__ if name != "persistence")
    assert row["kept"] == (row["through_ratio"] >= 0.7)
    assert [(r["way"], r["rollouts_per_group"], r["tokens"]) for r in told["rollouts"]] == [
        (way, size, tokens) for size in (8, 16) for tokens in (64, 512) for way in ("ours", "json")
    ]
    for row in told["rollouts"]:
        assert row.keys() == {*RolloutsRow.__slots__, "kept"}
        assert 0 < row["both_per_s"] < min(row["write_per_s"], row["read_per_s"])
        assert (row["ours_over_it"] is None) == (row["way"] == "ours")


def test_without_redis_benchmark_ours_is_told_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_peers, "PROGRAM", "no-such-program")
    (row,) = measure_bytes(sizes=[16384], persistence=["none"], megabytes=1, rounds=1)
    assert (row.through_ratio, row.kept, row.set_mb_s) == (None, None, None)
    assert row.through_mb_s > 0
    assert bytes_table([row]).row_count == 1


def test_ours_carries_every_payload_and_leaves_nothing() -> None:
    payloads = [encode_group(group) for group in make_groups(70, rollouts=2, tokens=8)]
    with fresh_server("none") as server:
        ours = Ours(server.near, server.far, read_bytes=10_000)
        assert ours.write(payloads).payload_bytes == sum(map(len, payloads))
        assert ours.read(70, len(payloads[0])).payload_bytes == sum(map(len, payloads))
        ledger = RedisStream(server.near, Keys(delivery_load.RUN)).ledger(LEARNER_GROUP)
        assert (ledger.produced, ledger.pending, ledger.fates) == (70, 0, {"trained": 70})
        assert server.near.xlen(Keys(delivery_load.RUN).trajectories) == 0


def test_a_writing_process_goes_on_where_this_one_ended() -> None:
    payload = payload_of(16384)
    with fresh_server("none") as server, WriterProcess(server.url, payload) as writer:
        ours = Ours(server.near, server.far, read_bytes=100_000)
        ours.write([payload] * 3)
        writer.start(4, ours.next_seq)
        assert writer.done().payload_bytes == 4 * len(payload)
        assert ours.read(7, len(payload)).payload_bytes == 7 * len(payload)


def test_what_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_load, "PASS_DEADLINE_S", 0.2)
    with fresh_server("none") as server, pytest.raises(DeadlineError, match="1 groups"):
        Ours(server.near, server.far, read_bytes=1).read(1, 100)


@with_benchmark
def test_redis_benchmark_moves_what_ours_moves() -> None:
    with fresh_server("none") as server:
        peer = RedisBenchmark(server.near)
        assert peer.write(5_000, 32, pipeline=16) > 0
        entries = server.near.xrange(delivery_peers.STREAM)
        assert len(entries) == 32
        assert {len(fields[b"payload"]) for _, fields in entries} == {5_000}
        sealed = delivery_load.Envelope("p", 1, 1, b"").seal()
        assert [name.decode() for name in entries[0][1]] == list(sealed)
        assert peer.read(5_000, 32, count=4) > 0
        (group,) = server.near.xinfo_groups(delivery_peers.STREAM)
        assert group["pending"] == 32
        assert peer.together(5_000, 32, pipeline=16, count=4) > 0
        assert server.near.xlen(delivery_peers.STREAM) == 64
        assert all(rate > 0 for rate in peer.set_and_get(1_000, 10))


@with_benchmark
def test_a_redis_benchmark_that_fails_says_why() -> None:
    with fresh_server("none") as server:
        peer = RedisBenchmark(server.near)
        server.near.config_set("requirepass", "another")
        with pytest.raises(TemporaryError, match="redis-benchmark ended with"):
            peer.set_and_get(10, 10)


def test_a_peer_carries_the_same_rollouts() -> None:
    groups = make_groups(2, rollouts=3, tokens=5)
    plain = messages(groups)
    got: list[dict[str, Any]] = []
    dumps, loads = JSON
    with fresh_server("none") as server:
        peer = OneByOne(server.near, server.far, dumps, lambda data: got.append(loads(data)) or {})
        assert peer.write(plain).payload_bytes == peer.read(6).payload_bytes
    assert got == plain
    decoded = [(g, r) for g in groups for r in decode_group(encode_group(g)).rollouts]
    assert [m["output_ids"] for m in plain] == [r.token_ids.tolist() for _, r in decoded]
    assert [m["input_ids"] for m in plain] == [g.prompt_token_ids.tolist() for g, _ in decoded]


def test_ratios_are_ours_over_theirs() -> None:
    ours, theirs = measure_rollouts({"json": JSON}, shapes=[(4, 8)], rollouts=10, rounds=1)
    assert ours.rollouts == theirs.rollouts == 12  # whole groups
    assert theirs.ours_over_it == pytest.approx(ours.both_per_s / theirs.both_per_s, rel=0.02)
    assert rollouts_table([ours, theirs]).row_count == 2


def test_payloads_are_about_as_large_as_asked() -> None:
    assert [len(payload_of(size)) / size for size in (2**16, 2**20)] == pytest.approx([1, 1], rel=0.01)


def test_the_benchmark_with_pickled_messages_runs() -> None:
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "pickled_rollouts.py"
    words = [sys.executable, "-I", str(program), "--rollouts", "16", "--rounds", "1", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {row["way"] for row in json.loads(done.stdout)["rollouts"]} == {"ours", "json", "pickle"}
