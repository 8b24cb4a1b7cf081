"""How quick pages of recorded trajectories are: rows made up in the columns of the recorder's files, and the queries of a table.

    .venv/bin/python -I benchmarks/recorded_pages.py --rows 1000000 --rows-per-file 65536 --out pages.json

Prints one JSON object: for each query the median and the slowest of --repeats in ms, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from starlette.testclient import TestClient

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import Range, TrajectoryFilter, Versions
from anabranch.consumers.trajectory_page import page
from anabranch.consumers.viewer.app import Viewed, make_app
from anabranch.schemas.trajectory_schema import SPAN

TOKENS, GROUP, BEGAN_MS = 32, 8, 1_767_225_600_000
QUERIES = {
    "first page": (TrajectoryFilter(), "appended_ms:desc", 1),
    "page 1000": (TrajectoryFilter(), "appended_ms:desc", 1000),
    "sort by reward": (TrajectoryFilter(), "reward:desc", 1),
    "sort by ratio_max": (TrajectoryFilter(), "ratio_max:desc", 1),
    "fate age": (TrajectoryFilter(fate="dropped:age"), "age:desc", 1),
    "one step": (TrajectoryFilter(step=Range(500, 500)), "reward", 1),
    "one version": (TrajectoryFilter(version=Versions(1, Range(500, 500))), "appended_ms", 1),
    "region and reward": (TrajectoryFilter(region="east", reward=Range(1, 1)), "loss_share:desc", 1),
    "text": (TrajectoryFilter(text="needle 77"), "appended_ms:desc", 1),
}


ADDRESSES = {
    "table, first page": "/trajectories",
    "table, page 1000": "/trajectories?page=1000",
    "table, fate age": "/trajectories?fate=age&sort=age:desc",
    "table, one step": "/trajectories?step=500",
    "table, text": "/trajectories?text=needle+77",
    "a trajectory": "/trajectory/west/p-0-ab/60000/3",
    "overview": "/",
}


def table(first: int, count: int, rng: np.random.Generator) -> pa.Table:
    """Rows of `count` // GROUP groups from row `first` on; trained, but for every fiftieth group, which was too old."""
    row = np.arange(first, first + count)
    group = row // GROUP
    old = group % 50 == 0
    step = 1 + group // 128
    offsets = pa.array(np.arange(0, count * TOKENS + 1, TOKENS, dtype=np.int32))

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    def known(values: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
        return pa.array(values, kind, mask=old)

    floats = rng.normal(size=(4, count * TOKENS)).astype(np.float32)
    spans = pa.StructArray.from_arrays(
        [pa.array(np.ones(count, np.int32)), pa.array(step - 1), pa.array(np.zeros(count, np.int32))], fields=list(SPAN)
    )
    text = [f"the answer to {g} is needle {r % 9973}" for g, r in zip(group.tolist(), row.tolist(), strict=True)]
    return pa.table(
        {
            "producer": pa.array(["p-0-ab"] * count), "group_index": group, "sample_index": (row % GROUP).astype(np.int32),
            "attempt": np.zeros(count, np.int32), "prompt_token_ids": lists(rng.integers(0, 5000, count * TOKENS, np.int32)),
            "token_ids": lists(rng.integers(0, 5000, count * TOKENS, np.int32)), "logprobs": lists(-np.abs(floats[0])),
            "version_spans": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), spans),
            "reward": rng.random(count).round(2), "finish_reason": pa.array(["stop"] * count),
            "prompt_text": pa.array([f"what is {g} + 1?" for g in group.tolist()]), "text": pa.array(text),
            "answer": pa.array([str(g + 1) for g in group.tolist()]), "started_ms": BEGAN_MS + group * 100,
            "finished_ms": BEGAN_MS + group * 100 + 50, "group_size": np.full(count, GROUP, np.int32),
            "entry_id": pa.array([f"{BEGAN_MS + g * 100 + 60}-0" for g in group.tolist()]), "seq": group,
            "tokens": np.full(count, TOKENS, np.int32), "version_min": step - 1, "version_max": step - 1,
            "epoch_min": np.ones(count, np.int32), "fate": pa.array(np.where(old, "dropped:age", "trained")),
            "fate_time_ms": BEGAN_MS + group * 100 + 90, "step": known(step), "train_epoch": np.ones(count, np.int32),
            "train_version": step, "age": rng.integers(0, 9, count), "advantage": known(rng.normal(size=count)),
            "weight": known(np.full(count, 1e-4)), "ratio_mean": known(rng.normal(1, 0.1, count).astype(np.float32)),
            "ratio_max": known(rng.normal(2, 0.1, count).astype(np.float32)), "kept_fraction": known(np.ones(count, np.float32)),
            "loss_share": known(rng.normal(size=count)), "learner_logprobs": lists(-np.abs(floats[1])),
            "entropy": lists(np.abs(floats[2])), "factor": lists(floats[3]), "kept": lists(floats[3] > 0),
        }
    )  # fmt: skip


def write_run(directory: Path, rows: int, rows_per_file: int) -> int:
    """Returns bytes on disk."""
    rng = np.random.default_rng(0)
    size = 0
    for first in range(0, rows, rows_per_file):
        region = ("east", "west")[first // rows_per_file % 2]
        made = table(first, min(rows_per_file, rows - first), rng)
        folder = directory / "trajectories" / "run=bench" / "epoch=1" / "day=2026-01-01" / f"region={region}"
        folder.mkdir(parents=True, exist_ok=True)
        ids = made.column("entry_id")
        path = folder / f"{ids[0].as_py()}_{ids[-1].as_py()}.parquet"
        pq.write_table(made, path, compression="zstd")
        size += path.stat().st_size
    return size


def measure(directory: Path, repeats: int) -> dict[str, dict[str, float]]:
    found = {}
    with RunReader(directory) as reader:
        for name, (wanted, sort, number) in QUERIES.items():
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                _, total = page(reader, wanted, sort=sort, limit=50, number=number)
                times.append(1000 * (time.perf_counter() - began))
            counted = times[1:]
            found[name] = {
                "rows": total, "first_ms": times[0], "median_ms": statistics.median(counted), "slowest_ms": max(counted),
            }  # fmt: skip
    return found


def measure_viewer(directory: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Pages of the viewer, from request to the last byte, in this process."""
    found = {}
    with RunReader(directory) as reader:
        client = TestClient(make_app(Viewed("bench", reader), hosts=("testserver",)))
        for name, address in ADDRESSES.items():
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                answer = client.get(address)
                times.append(1000 * (time.perf_counter() - began))
                assert answer.status_code == 200, answer.text
            counted = times[1:]
            found[name] = {
                "bytes": len(answer.content),
                "first_ms": times[0],
                "median_ms": statistics.median(counted),
                "slowest_ms": max(counted),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rows-per-file", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_run(Path(folder), args.rows, args.rows_per_file)
        files = len(list(Path(folder).rglob("*.parquet")))
        result = {
            "rows": args.rows, "files": files, "bytes": size, "queries": measure(Path(folder), args.repeats),
            "viewer": measure_viewer(Path(folder), args.repeats),
        }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
