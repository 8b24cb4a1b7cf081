"""`anabranch bench codec` as a person and as a program gets it: the table, --json, and errors in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anabranch.cli.main import main
from anabranch.deploy import bench_codec
from anabranch.deploy.bench_codec import Figures
from anabranch.deploy.codec_pair import load_pair
from anabranch.deploy.codec_peers import peers
from anabranch.deploy.codec_table import render
from tests.unit.deploy.step_pairs import write_pair

KEYS = {"format", "threads", "bytes_per_change", "encode_mb_s", "decode_mb_s"}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path)


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


@pytest.mark.parametrize("half", ["base", "change"])
def test_a_missing_file_is_told_in_one_line(prefix: str, half: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{prefix}.{half}.safetensors").unlink()
    assert main(["bench", "codec", "--pair", prefix]) == 2
    told = capsys.readouterr().err
    assert f"there is no {prefix}.{half}.safetensors; --pair PREFIX stands for" in told
    assert told.count("\n") == 1
