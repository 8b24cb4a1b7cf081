"""Reading step records: whole ones count, damaged ones are named, nothing is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.consumers.step_records import (
    StepPlace,
    read_facts,
    read_rollouts,
    record_bytes,
    recorded_steps,
    step_folders,
)
from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.step_record import FACTS_FILE, ROLLOUT_SCHEMA, rank_file
from tests.step_records import facts, rows_of, write_rank, write_record


def place_of(tmp_path: Path, **changes: object) -> StepPlace:
    write_record(tmp_path, facts(**changes))
    return recorded_steps(tmp_path)[0]


def test_only_whole_records_count_and_they_are_sorted(tmp_path: Path) -> None:
    assert recorded_steps(tmp_path) == []
    for epoch, step in ((2, 11), (1, 9), (1, 10), (10, 1)):
        write_record(tmp_path, facts(epoch=epoch, step=step, version_before=step - 1, now=f"e{epoch}.v{step - 1}"))
    write_rank(tmp_path / "steps" / "epoch=2" / "000012", 0, rows_of(facts()))  # killed before its facts
    (tmp_path / "steps" / "epoch=2" / "notes").mkdir()
    (tmp_path / "steps" / "README").write_text("x")
    assert [(p.epoch, p.step) for p in recorded_steps(tmp_path)] == [(1, 9), (1, 10), (2, 11), (10, 1)]
    assert [(p.epoch, p.step) for p in step_folders(tmp_path)] == [(1, 9), (1, 10), (2, 11), (2, 12), (10, 1)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_rows_of_all_ranks_come_back_in_the_batchs_order(tmp_path: Path, world_size: int) -> None:
    made = facts(world_size=world_size)
    place = place_of(tmp_path, world_size=world_size)
    assert read_facts(place) == made
    table = read_rollouts(place, made)
    assert table.schema.equals(ROLLOUT_SCHEMA)
    assert table.to_pylist() == rows_of(made)
    narrow = read_rollouts(place, made, ["tokens", "group_index"])
    assert narrow.column_names == ["tokens", "group_index"]
    assert narrow.column("group_index").to_pylist() == [8, 8, 9, 9]
    assert record_bytes(place) == sum(p.stat().st_size for p in place.folder.iterdir())


def test_damage_is_named(tmp_path: Path) -> None:
    place, made = place_of(tmp_path), facts()
    path = place.folder / rank_file(0)
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"PAR1 nothing PAR1"):
        path.write_bytes(content)
        with pytest.raises(StepRecordError, match=r"rank-0\.parquet cannot be read"):
            read_rollouts(place, made)
    path.unlink()
    with pytest.raises(StepRecordError, match=r"rank-0\.parquet cannot be read"):
        read_rollouts(place, made)
    write_rank(place.folder, 0, rows_of(made)[:-1])
    with pytest.raises(StepRecordError, match="3 rows, not one for each of 4"):
        read_rollouts(place, made)
    (place.folder / FACTS_FILE).write_bytes(made.to_json()[:50])
    with pytest.raises(StepRecordError, match=r"facts\.json: not the facts of a step"):
        read_facts(place)
    (place.folder / FACTS_FILE).unlink()
    with pytest.raises(StepRecordError, match=r"facts\.json"):
        read_facts(place)


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    other = place.folder.with_name("000009")
    os.rename(place.folder, other)
    with pytest.raises(StepRecordError, match="epoch 1, step 4: the folder was renamed"):
        read_facts(StepPlace(1, 9, other))


def test_a_record_that_goes_away_meanwhile_has_no_bytes(tmp_path: Path) -> None:
    assert record_bytes(StepPlace(1, 1, tmp_path / "gone")) == 0


def test_the_command_shows_what_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path, facts())
    write_record(tmp_path, facts(epoch=2, now="e2.v3", zero_variance=[8], skipped=[9]))
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    assert main(["replay", "steps", "--run", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:7] == ["1", "4", "0.1", "1.5", "2", "0", "0"]
    assert lines[2].split()[:7] == ["2", "4", "0.1", "1.5", "2", "1", "1"]
    assert main(["replay", "steps", "--run", str(tmp_path), "--last", "1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["epoch"], json.loads(line)["loss_bits"]) == (2, (0.1).hex())
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_the_command_names_what_is_damaged_and_shows_the_rest(tmp_path: Path, capsys) -> None:
    folder = write_record(tmp_path, facts())
    write_record(tmp_path, facts(epoch=2, now="e2.v3"))
    (folder / FACTS_FILE).write_text("{")
    assert main(["replay", "steps", "--run", str(tmp_path)]) == 76
    shown = capsys.readouterr()
    assert "epoch=1/000004/facts.json: not the facts of a step" in shown.err
    assert len(shown.out.splitlines()) == 2


def test_the_command_says_that_nothing_is_there(tmp_path: Path, capsys) -> None:
    assert main(["replay", "steps", "--run", str(tmp_path)]) == 0
    assert f"no step is recorded in {tmp_path}" in capsys.readouterr().out
    assert main(["replay", "steps", "--run", str(tmp_path / "none")]) == 2
    assert "there is no run directory" in capsys.readouterr().err
