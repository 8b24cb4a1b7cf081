"""`anabranch bench codec`: a bad pair is refused by name, every format is checked, and --json is what it promises."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anabranch.cli.main import main
from anabranch.deploy import bench_codec
from anabranch.deploy.bench_codec import Effort, Figures, bench_deltas, busy_elsewhere, measure, on_cores
from anabranch.deploy.codec_pair import load_pair
from anabranch.deploy.codec_peers import Format, IndexValue, peers
from anabranch.deploy.codec_table import render
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import AnabranchError, DeltaError, UsageError

Array = np.ndarray[Any, Any]
QUICK = Effort(repeats=1, budget_s=1.0)
KEYS = {"format", "threads", "bytes_per_change", "encode_mb_s", "decode_mb_s"}


def write(path: Path, tensors: dict[str, tuple[str, list[int], Array]]) -> None:
    """A safetensors file of (dtype, shape, bits)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, bits) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bits.tobytes() for _, _, bits in tensors.values()))


def base_tensors() -> dict[str, tuple[str, list[int], Array]]:
    random = np.random.default_rng(0)
    wide = (random.normal(0, 0.02, 100_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "b.weight": ("BF16", [100, 1000], wide),
        "a.index": ("F32", [40], random.normal(0, 1, 40).astype(np.float32).view(np.uint32)),
        "quiet": ("F8_E4M3", [8, 8], np.arange(64, dtype=np.uint8)),
        "scalar": ("F16", [], np.array([0x8000], np.uint16)),
    }


def change_tensors() -> dict[str, tuple[str, list[int], Array]]:
    at = np.arange(7, 100_000, 250, dtype=np.uint32)
    new = base_tensors()["b.weight"][2][at] + np.uint16(1)
    return {
        "b.weight.index": ("U32", [at.size], at),
        "b.weight.bits": ("U16", [at.size], new),
        "a.index.index": ("U32", [2], np.array([0, 39], np.uint32)),
        "a.index.bits": ("U32", [2], np.array([0x7FC00001, 0x80000000], np.uint32)),  # a NaN's payload, −0
        "scalar.index": ("U32", [1], np.array([0], np.uint32)),
        "scalar.bits": ("U16", [1], np.array([0x8000], np.uint16)),  # as before: an entry, but no change
    }


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    (tmp_path / "a folder").mkdir()
    prefix = str(tmp_path / "a folder" / "step.1")
    write(Path(prefix + ".base.safetensors"), base_tensors())
    write(Path(prefix + ".change.safetensors"), change_tensors())
    return prefix


def test_a_pair_of_several_widths(prefix: str) -> None:
    pair = load_pair(prefix)
    assert pair.name == "step.1"
    assert [t.dtype for t in pair.layout.tensors] == ["f32", "bf16", "f8_e4m3", "f16"]
    assert pair.changed_elements() == 402, "400 + 2; one entry repeats what was there"
    assert pair.new["a.index"][[0, 39]].tolist() == [0x7FC00001, 0x80000000]
    assert np.array_equal(pair.new["a.index"][1:39], base_tensors()["a.index"][2][1:39])
    assert np.array_equal(pair.new["quiet"], pair.base["quiet"])
    assert not np.shares_memory(pair.new["quiet"], pair.base["quiet"])
    assert pair.dense_bytes == 200_000 + 160 + 64 + 2


def test_indices_may_be_64_bits_wide(prefix: str) -> None:
    changes = change_tensors()
    at = changes["b.weight.index"][2]
    changes["b.weight.index"] = ("U64", [at.size], at.astype(np.uint64))
    write(Path(prefix + ".change.safetensors"), changes)
    assert load_pair(prefix).changed_elements() == 402


U32 = np.uint32
BAD = {
    "a change of a tensor that is not there": ({"c.index": ("U32", [0], np.array([], U32))}, "'c.index' changes a tensor"),
    "an entry of neither kind": ({"b.weight": ("U32", [0], np.array([], U32))}, "'b.weight' is neither"),
    "an index alone": ({"quiet.index": ("U32", [0], np.array([], U32))}, "'quiet' has no quiet.bits"),
    "bits alone": ({"quiet.bits": ("U8", [0], np.array([], np.uint8))}, "'quiet' has no quiet.index"),
    "an index past the end": ({"a.index.index": ("U32", [2], np.array([0, 40], U32))}, "index 40 is outside of its 40"),
    "a negative index": ({"a.index.index": ("I32", [2], np.array([-1, 3], np.int32))}, "index -1 is outside"),
    "indices that do not ascend": ({"a.index.index": ("U32", [2], np.array([3, 3], U32))}, "do not ascend"),
    "an index of floats": ({"a.index.index": ("F32", [2], np.zeros(2, np.float32))}, "its index is F32"),
    "lists of different length": ({"a.index.index": ("U32", [1], np.array([3], U32))}, "not two lists as long"),
    "bits of another width": ({"a.index.bits": ("U16", [2], np.zeros(2, np.uint16))}, "the base's are 32 bits wide"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_change_file_is_refused_by_name(prefix: str, what: str) -> None:
    entries, told = BAD[what]
    write(Path(prefix + ".change.safetensors"), change_tensors() | entries)
    with pytest.raises(DeltaError, match=told) as error:
        load_pair(prefix)
    assert "step.1.change.safetensors" in str(error.value)


def test_a_base_of_an_unknown_dtype_is_refused(prefix: str) -> None:
    write(Path(prefix + ".base.safetensors"), base_tensors() | {"odd": ("U16", [1], np.array([1], np.uint16))})
    with pytest.raises(DeltaError, match=r"base\.safetensors: tensor 'odd' has dtype U16; known: BF16"):
        load_pair(prefix)


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
@pytest.mark.parametrize("half", ["base", "change"])
def test_a_damaged_file_is_refused(prefix: str, half: str, content: bytes) -> None:
    Path(f"{prefix}.{half}.safetensors").write_bytes(content)
    with pytest.raises(DeltaError, match=rf"step.1.{half}.safetensors is no safetensors file"):
        load_pair(prefix)


@pytest.mark.parametrize("half", ["base", "change"])
def test_a_missing_file_is_told_in_one_line(prefix: str, half: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{prefix}.{half}.safetensors").unlink()
    assert main(["bench", "codec", "--pair", prefix]) == 2
    told = capsys.readouterr().err
    assert f"there is no {prefix}.{half}.safetensors; --pair PREFIX stands for" in told
    assert told.count("\n") == 1


def test_a_folder_for_a_file_is_a_usage_error(prefix: str) -> None:
    Path(prefix + ".base.safetensors").unlink()
    Path(prefix + ".base.safetensors").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        load_pair(prefix)


def test_a_pair_without_a_change_has_no_bytes_per_change(prefix: str) -> None:
    write(Path(prefix + ".change.safetensors"), {})
    with pytest.raises(AnabranchError, match=r"nothing changed in step\.1"):
        bench_deltas(load_pair(prefix), peers(), QUICK, lambda _: None)


def test_one_row_for_each_format_and_thread_count(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "thread_counts", lambda: [1, 3])
    pair = load_pair(prefix)
    rows = bench_deltas(pair, peers(), QUICK, lambda _: None)
    assert [(r["format"], r["threads"]) for r in rows] == [(c.name, t) for c in peers() for t in (1, 3)]
    assert all(r.keys() == KEYS for r in rows)
    assert all(min(r["encode_mb_s"], r["decode_mb_s"], r["bytes_per_change"]) > 0 for r in rows)
    size = len(IndexValue().encode(pair.base, pair.new, Workers()))
    assert rows[0]["bytes_per_change"] == pytest.approx(size / 402), "of the complete file, for what really changed"


class Wrong(IndexValue):
    """Loses the last change."""

    name = "wrong"

    def decode(self, state: dict[str, Array], encoded: bytes, workers: Workers) -> Any:
        decoded = dict(super().decode(state, encoded, workers))
        decoded["a.index"][39] ^= 1
        return decoded


class Slow(IndexValue):
    name = "slow"

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        time.sleep(0.05)
        return super().encode(base, new, workers)


def test_a_format_that_is_not_exact_is_not_reported(prefix: str) -> None:
    with pytest.raises(AnabranchError, match=r"wrong did not give back the new weights of step\.1: tensor 'a\.index'"):
        bench_deltas(load_pair(prefix), [Wrong()], QUICK, lambda _: None)


def test_a_slow_format_gets_fewer_runs(prefix: str) -> None:
    formats: list[Format] = [IndexValue(), Slow()]
    quick, slow = measure(load_pair(prefix), formats, 1, Effort(repeats=9, budget_s=0.12), lambda _: None)
    assert len(quick.encode_s) == 9
    assert len(slow.encode_s) == 3, "0.05 s each: the third crosses the budget"


class Lingering(IndexValue):
    """Returns while a thread of its own still computes, as arc_v3 does."""

    name = "lingering"
    threads: list[threading.Thread]

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        def compute() -> None:
            end = time.thread_time() + 0.15
            while time.thread_time() < end:
                pass

        self.threads.append(threading.Thread(target=compute))
        self.threads[-1].start()
        return super().encode(base, new, workers)


class Watching(IndexValue):
    """Notes for each run whether a thread of `beside` is still at work."""

    name = "watching"

    def __init__(self, beside: Lingering) -> None:
        self.beside = beside
        self.seen: list[bool] = []

    def encode(self, base: Any, new: Any, workers: Workers) -> bytes:
        self.seen.append(any(thread.is_alive() for thread in self.beside.threads))
        return super().encode(base, new, workers)


def test_what_one_format_leaves_running_is_not_taken_from_the_next(prefix: str) -> None:
    lingering = Lingering()
    lingering.threads = []
    watching = Watching(lingering)
    measure(load_pair(prefix), [lingering, watching], 1, Effort(repeats=2), lambda _: None)
    assert len(lingering.threads) >= 3
    assert len(watching.seen) >= 3
    assert not any(watching.seen)


def test_decoding_starts_from_the_base_every_time(prefix: str) -> None:
    """XOR applied twice would undo itself."""
    pair = load_pair(prefix)
    kept = {name: bits.copy() for name, bits in pair.base.items()}
    measure(pair, peers(), 1, Effort(repeats=2), lambda _: None)
    assert all(np.array_equal(kept[name], bits) for name, bits in pair.base.items())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot keep a thread to a core")
def test_one_thread_is_one_core() -> None:
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what others use")
def test_the_work_of_other_processes_is_noticed() -> None:
    busy = busy_elsewhere()
    spin = "import time; end = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-I", "-c", spin], check=True, timeout=20)
    assert busy() > 0.5


def test_the_table_compares_within_the_run(prefix: str) -> None:
    def row(name: str, threads: int, encode: float, **more: Any) -> dict[str, Any]:
        sizes = {"bytes_per_change": 1.5} | more
        return {"format": name, "threads": threads, "encode_mb_s": encode, "decode_mb_s": 2 * encode} | sizes

    deltas = [
        row("anabranch", 1, 1000.0),
        row("u16gap+bf16+zstd1", 1, 12345.0),
        row("anabranch", 2, 1900.0),
        row("arc_v3", 1, 40.0),
        row("arc_v3", 2, 50.0),
    ]
    snapshots = [row(n, t, 14000.0, bytes_per_raw_byte=0.66) for n in ("anabranch-snapshot", "zipnn") for t in (1, 128)]
    scan = row("scan", 1, 9000.0, copyto_mb_s=12000.0, scan_to_copyto=0.75)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(Figures(load_pair(prefix), deltas, snapshots, scan)))
    console.file.close()
    shown = console.export_text()
    assert "402 changed" in shown
    assert "25.0 / 25.0" in shown, "1000 / 40"
    assert "38.0 / 38.0" in shown, "1900 / 50"
    assert "1.90 / 1.90" in shown, "two threads against one"
    assert "…" not in shown, "80 columns are enough"
    assert "0.75 times numpy.copyto" in shown


def test_json_is_one_list(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "codec", "--pair", prefix, "--repeats", "1", "--json"]
    assert main([*argv, "--peers"]) == 0
    captured = capsys.readouterr()
    assert all("other processes used" in line for line in captured.err.splitlines())
    rows = json.loads(captured.out)
    counts = bench_codec.thread_counts()
    names = ["anabranch", *(c.name for c in peers()), "arc_v3"]
    assert [(r["format"], r["threads"]) for r in rows] == [(n, t) for n in names for t in counts]
    assert all(r.keys() == KEYS for r in rows)


def test_snapshots_and_the_scan_are_further_objects(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--pair", prefix, "--repeats", "1", "--json", "--snapshot", "--scan"]) == 0
    captured = capsys.readouterr()
    rows = {r["format"]: r for r in json.loads(captured.out) if r["threads"] == 1}
    assert rows.keys() - {"zipnn"} == {"anabranch", "anabranch-snapshot", "scan"}
    assert 0 < rows["anabranch-snapshot"]["bytes_per_raw_byte"] < 1
    assert rows["anabranch-snapshot"]["bytes_per_change"] is None
    assert rows["scan"]["scan_to_copyto"] > 0
    assert "zipnn" in rows or "zipnn is not installed" in captured.err


def test_the_table_is_what_a_person_gets(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--pair", prefix, "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "anabranch" in shown
    assert "numpy.copyto" in shown
