"""How fast `anabranch record` is, and what of a core it takes at a learner's rate.

    .venv/bin/python -I benchmarks/recorder_rate.py --out recorder.json

Groups of 8 rollouts are put into an embedded Valkey first; then the recorder's own loop drains the stream to Parquet. Its CPU is that of this
process and of all its threads; the server's is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.consumers.recorder import Recorder
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.keys import RECORDER_GROUP, Keys
from anabranch.schemas.trajectory import Group, Rollout, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream

RUN, SAMPLES, AT_ONCE = "bench", 8, 64


def group_of(index: int, tokens: int, rng: np.random.Generator) -> Group:
    rollouts = []
    for sample in range(SAMPLES):
        ids = rng.integers(0, 50_000, tokens).astype(np.int32)
        logprobs = (-rng.exponential(1.0, tokens)).astype(np.float32)
        spans = (VersionSpan(PolicyVersion(1, index // 32), 0),)
        text = "".join(map(chr, rng.integers(97, 123, 4 * tokens)))
        rollouts.append(Rollout(sample, ids, logprobs, spans, float(sample % 2), "stop", text, 1, 2))
    prompt = rng.integers(0, 50_000, 128).astype(np.int32)
    return Group(RUN, "east", "p", index, 0, prompt, "a question " * 40, "42", tuple(rollouts))


def fill(stream: RedisStream, groups: int, tokens: int) -> int:
    """Returns payload bytes."""
    rng, total, floor = np.random.default_rng(0), 0, 0
    for start in range(0, groups, AT_ONCE):
        payloads = [(i, encode_group(group_of(i, tokens, rng))) for i in range(start, min(groups, start + AT_ONCE))]
        floor = stream.append([Envelope("p", i, i, payload) for i, payload in payloads], floor=floor)
        total += sum(len(payload) for _, payload in payloads)
    return total


def measure(config: RunConfig, folder: Path, groups: int, tokens: int) -> dict[str, Any]:
    with EmbeddedValkey(folder / "valkey") as server:
        stream = RedisStream(connect(server.url, deadline_s=10, what="the benchmark's Valkey"), Keys(RUN))
        payload = fill(stream, groups, tokens)
        recorder = Recorder({"east": stream}, folder / "trajectories", config)
        wall, cpu = time.monotonic(), time.process_time()
        while stream.ledger(RECORDER_GROUP).pending or recorder.buffered or not recorder.rows_written:
            if not recorder.poll():
                recorder.flush()
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        stream.close()
    rows = groups * SAMPLES
    assert recorder.rows_written == rows, recorder.rows_written
    written = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    return {
        "tokens": tokens, "rows": rows, "files": recorder.files_written, "payload_mb": round(payload / 1e6, 1),
        "rows_per_s": round(rows / wall), "payload_mb_per_s": round(payload / 1e6 / wall, 1),
        "cpu_ms_per_1000_rows": round(1e6 * cpu / rows, 1), "parquet_bytes_per_row": round(written / rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    config = load_config("", overrides=[f"run.name={RUN}", "stream.block_ms=1"])
    found = []
    for tokens in args.tokens:
        with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder:
            found.append(measure(config, Path(folder), args.groups, tokens))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"recorder": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
