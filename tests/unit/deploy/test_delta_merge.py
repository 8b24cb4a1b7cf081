"""Merged files do what their parts do in turn, with the base and without, and parts that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anabranch.deploy.delta_apply import apply_in_place, apply_to_new
from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels, WrittenDelta
from anabranch.deploy.delta_merge import merge
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.transport.delta_file import DeltaFile
from tests.checkpoints import State, load, random_state, raw, save, step


@pytest.fixture(autouse=True)
def _several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 700)


def labels(version: int, base: int | None, *, run: str = "r", epoch: int = 0) -> Labels:
    return Labels(run, epoch, version, base, learner_step=version)


@pytest.fixture
def line(tmp_path: Path) -> list[State]:
    """States 0 to 3, saved as s0 to s3; 1.delta to 3.delta join them, 0.anchor is the first."""
    states = [random_state()]
    for seed in (1, 2, 3):
        states.append(step(states[-1], seed=seed))
    for number, state in enumerate(states):
        save(tmp_path / f"s{number}", state)
        if number:
            diff(tmp_path / f"s{number - 1}", tmp_path / f"s{number}", tmp_path / f"{number}.delta",
                 labels(number, number - 1), threads=1)  # fmt: skip
    diff(None, tmp_path / "s0", tmp_path / "0.anchor", labels(0, None), threads=1)
    return states


def merged(folder: Path, *names: str, out: str = "m", base: str | None = None) -> WrittenDelta:
    return merge([folder / n for n in names], folder / out, base=folder / base if base else None, threads=2)


def applied(folder: Path, old: str | None, file: str) -> State:
    with DeltaFile(folder / file) as delta:
        apply_to_new(folder / old if old else None, delta, folder / "out", force=True, threads=2)
    return load(folder / "out")


@pytest.mark.parametrize("base", [None, "s0"])
def test_one_file_does_what_three_do(tmp_path: Path, line: list[State], base: str | None) -> None:
    written = merged(tmp_path, "1.delta", "2.delta", "3.delta", base=base)
    assert raw(applied(tmp_path, "s0", "m")) == raw(line[3])
    assert written.header.manifest.base is not None
    assert (written.header.manifest.base.version, written.header.manifest.version) == (0, 3)
    assert len(written.header.stages) == (1 if base else 3)
    with DeltaFile(tmp_path / "m") as delta:
        assert apply_in_place(tmp_path / "s0", delta, threads=2).how == "changed"
    assert (tmp_path / "s0").read_bytes() == (tmp_path / "s3").read_bytes()


def test_with_the_base_it_is_the_file_that_diff_would_write(tmp_path: Path, line: list[State]) -> None:
    merged(tmp_path, "1.delta", "2.delta", base="s0")
    diff(tmp_path / "s0", tmp_path / "s2", tmp_path / "direct", labels(2, 0), threads=1)
    assert (tmp_path / "m").read_bytes() == (tmp_path / "direct").read_bytes()


def test_merging_merged_files(tmp_path: Path, line: list[State]) -> None:
    merged(tmp_path, "1.delta", "2.delta", out="12")
    merged(tmp_path, "12", "3.delta", out="123")
    merged(tmp_path, "1.delta", "2.delta", "3.delta", out="at once")
    assert (tmp_path / "123").read_bytes() == (tmp_path / "at once").read_bytes()
    merged(tmp_path, "12", "3.delta", out="small", base="s0")
    assert raw(applied(tmp_path, "s0", "small")) == raw(line[3])
    assert (tmp_path / "small").stat().st_size < (tmp_path / "123").stat().st_size


def test_without_the_base_it_costs_a_header_less_than_its_parts(tmp_path: Path, line: list[State]) -> None:
    written = merged(tmp_path, "1.delta", "2.delta")
    assert written.size_bytes < sum((tmp_path / f"{n}.delta").stat().st_size for n in (1, 2))
    parts = [diff_header(tmp_path / f"{n}.delta") for n in (1, 2)]
    assert written.header.changed == tuple(a + b for a, b in zip(*parts, strict=True))


def diff_header(path: Path) -> tuple[int, ...]:
    with DeltaFile(path) as delta:
        return delta.header.changed


def test_an_anchor_and_deltas_make_an_anchor(tmp_path: Path, line: list[State]) -> None:
    written = merged(tmp_path, "0.anchor", "1.delta", "2.delta")
    assert written.header.manifest.kind == "anchor"
    assert written.header.manifest.version == 2
    assert raw(applied(tmp_path, None, "m")) == raw(line[2])
    diff(None, tmp_path / "s2", tmp_path / "direct", labels(2, None), threads=1)
    assert (tmp_path / "m").read_bytes() == (tmp_path / "direct").read_bytes()


def test_changes_that_were_taken_back_vanish(tmp_path: Path, line: list[State]) -> None:
    diff(tmp_path / "s1", tmp_path / "s0", tmp_path / "back", labels(2, 1), threads=1)
    assert merged(tmp_path, "1.delta", "back", base="s0").header.manifest.changed_elements == 0
    assert raw(applied(tmp_path, "s0", "m")) == raw(line[0])
    assert len(merged(tmp_path, "1.delta", "back").header.stages) == 2
    assert raw(applied(tmp_path, "s0", "m")) == raw(line[0])


def test_empty_deltas_leave_no_stage(tmp_path: Path, line: list[State]) -> None:
    diff(tmp_path / "s1", tmp_path / "s1", tmp_path / "nothing", labels(2, 1), threads=1)
    diff(tmp_path / "s1", tmp_path / "s1", tmp_path / "again", labels(3, 2), threads=1)
    assert merged(tmp_path, "1.delta", "nothing").header.stages == diff_stages(tmp_path / "1.delta")
    assert merged(tmp_path, "nothing", "again").header.stages == (0,)
    assert raw(applied(tmp_path, "s1", "m")) == raw(line[1])


def diff_stages(path: Path) -> tuple[int, ...]:
    with DeltaFile(path) as delta:
        return delta.header.stages


def test_a_gap_is_refused_with_both_digests(tmp_path: Path, line: list[State]) -> None:
    with DeltaFile(tmp_path / "1.delta") as first, DeltaFile(tmp_path / "3.delta") as third:
        ends, base = first.header.manifest.result_digest, third.header.manifest.base
    assert base is not None
    with pytest.raises(DeltaError, match=f"3.delta does not follow .*{base.digest}.*{ends}"):
        merged(tmp_path, "1.delta", "3.delta")
    assert not (tmp_path / "m").exists()


def test_other_models_runs_and_epochs_are_refused(tmp_path: Path, line: list[State]) -> None:
    other = save(tmp_path / "other", {"a": torch.zeros(3)})
    diff(other, other, tmp_path / "x", labels(2, 1), threads=1)
    with pytest.raises(DeltaError, match="different models: tensor 'a'"):
        merged(tmp_path, "1.delta", "x")
    for changed in ({"run": "q"}, {"epoch": 1}):
        diff(tmp_path / "s1", tmp_path / "s2", tmp_path / "x", labels(2, 1, **changed), threads=1)  # type: ignore[arg-type]
        with pytest.raises(DeltaError, match="of run"):
            merged(tmp_path, "1.delta", "x")


def test_versions_must_grow_from_first_to_last(tmp_path: Path, line: list[State]) -> None:
    """Labels of single files may all be 0 -> 1; only what the merged file would say must make sense."""
    diff(tmp_path / "s0", tmp_path / "s1", tmp_path / "a", labels(6, 5), threads=1)
    diff(tmp_path / "s1", tmp_path / "s2", tmp_path / "b", labels(1, 0), threads=1)
    with pytest.raises(UsageError, match=r"begins at version 5 and .* ends at version 1"):
        merged(tmp_path, "a", "b")
    diff(tmp_path / "s0", tmp_path / "s1", tmp_path / "a", labels(1, 0), threads=1)
    merged(tmp_path, "a", "b")


def test_an_anchor_takes_no_base_and_comes_first(tmp_path: Path, line: list[State]) -> None:
    with pytest.raises(UsageError, match="leave --base out"):
        merged(tmp_path, "0.anchor", "1.delta", base="s0")
    diff(None, tmp_path / "s1", tmp_path / "1.anchor", labels(1, None), threads=1)
    with pytest.raises(UsageError, match="begin with it"):
        merged(tmp_path, "1.delta", "1.anchor")


def test_another_base_is_refused(tmp_path: Path, line: list[State]) -> None:
    with pytest.raises(DeltaError, match="s1 has digest"):
        merged(tmp_path, "1.delta", "2.delta", base="s1")
    assert not (tmp_path / "m").exists()


def test_the_output_may_be_one_of_the_inputs(tmp_path: Path, line: list[State]) -> None:
    merged(tmp_path, "1.delta", "2.delta", out="1.delta")
    assert raw(applied(tmp_path, "s0", "1.delta")) == raw(line[2])
