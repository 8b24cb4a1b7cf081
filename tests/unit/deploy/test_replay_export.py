"""Exports hold what `ls` finds, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import TrajectoryFilter
from anabranch.deploy.replay_export import export
from anabranch.schemas.errors import UsageError
from tests.limits import file_size_limit
from tests.replay_runs import write_run

TRAINED = TrajectoryFilter(fate="trained")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    with RunReader(write_run(tmp_path_factory.mktemp("export") / "run")) as reader:
        yield reader


def test_json_lines_and_parquet_hold_every_column_in_order(reader: RunReader, tmp_path: Path) -> None:
    rows = reader.rows("SELECT * FROM trajectories WHERE fate = 'trained' ORDER BY appended_ms, region, sample_index")
    assert export(reader, TRAINED, tmp_path / "a.jsonl") == 6
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == rows
    assert export(reader, TRAINED, tmp_path / "a.parquet") == 6
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == rows


def test_safetensors_hold_ragged_rows(reader: RunReader, tmp_path: Path) -> None:
    assert export(reader, TrajectoryFilter(region="west"), tmp_path / "a.safetensors") == 6
    found = load_file(tmp_path / "a.safetensors")
    assert found["token_offsets"].tolist() == list(range(0, 19, 3))
    assert found["token_ids"][:6].tolist() == [7, 8, 9, 7, 9, 9]
    assert found["prompt_token_ids"].tolist() == [5, 6] * 6
    assert found["versions"][:3].tolist() == [0, 0, 1]
    assert found["epochs"][:3].tolist() == [1, 1, 2]
    assert found["reward"].dtype == np.float64
    assert np.isnan(found["learner_logprobs"][6:12]).all(), "the pending group has none"
    assert found["learner_logprobs"][:3].tolist() == [-0.5, -1.0, -2.5]
    assert found["step"].tolist() == [2, 2, -1, -1, 2, 2]
    offsets = found["id_offsets"]
    assert found["id_bytes"][offsets[0] : offsets[1]].tobytes() == b"west/west-0-cd/1/0"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "safetensors"])
def test_no_rows_are_a_file_too(reader: RunReader, tmp_path: Path, form: str) -> None:
    assert export(reader, TrajectoryFilter(region="mars"), tmp_path / f"a.{form}") == 0
    assert (tmp_path / f"a.{form}").exists()


def test_columns_and_limit(reader: RunReader, tmp_path: Path) -> None:
    assert export(reader, TRAINED, tmp_path / "a", form="jsonl", columns=["id", "reward"], limit=1) == 1
    assert (tmp_path / "a").read_text() == '{"id": "east/east-0-ab/1/0", "reward": 0.0}\n'
    with pytest.raises(UsageError, match="did you mean 'reward'"):
        export(reader, TRAINED, tmp_path / "b.jsonl", columns=["rewrad"])


def test_what_exists_is_kept_unless_it_is_to_be_replaced(reader: RunReader, tmp_path: Path) -> None:
    target = tmp_path / "a.jsonl"
    target.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        export(reader, TRAINED, target)
    assert target.read_text() == "mine"
    assert export(reader, TRAINED, target, replace=True) == 6


@pytest.mark.parametrize("form", ["jsonl", "parquet", "safetensors"])
def test_a_full_disk_leaves_nothing(reader: RunReader, tmp_path: Path, form: str) -> None:
    with file_size_limit(100), pytest.raises(OSError, match="large"):
        export(reader, TRAINED, tmp_path / f"a.{form}")
    assert list(tmp_path.iterdir()) == []


def test_a_name_without_a_format_is_refused(reader: RunReader, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--format"):
        export(reader, TRAINED, tmp_path / "a.txt")
