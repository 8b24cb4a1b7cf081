"""What show says adds up, for a small model and for one with very many tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels
from anabranch.deploy.delta_merge import merge
from anabranch.deploy.delta_show import describe, rows_to_show, summary, table
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.transport.delta_file import DeltaFile
from tests.checkpoints import TENSORS, State, random_state, save, step

LABELS = Labels("r", 3, 8, 7, learner_step=8)


def described(folder: Path, old: State, *news: State) -> dict[str, Any]:
    """Of the file that leads from `old` over each of `news`."""
    files = []
    for number, (before, after) in enumerate(zip((old, *news), news, strict=False)):
        paths = [folder / f"{number}{side}" for side in "ab"]
        save(paths[0], before)
        save(paths[1], after)
        files.append(folder / f"{number}.delta")
        diff(paths[0], paths[1], files[-1], LABELS, threads=1)
    if len(files) > 1:
        merge(files, folder / "0.delta", base=None, threads=1)
    with DeltaFile(folder / "0.delta") as delta:
        return describe(delta, threads=2)


def text_of(about: dict[str, Any], *, every: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(about, every=every))
    return "\n".join(f"{what} {value}" for what, value in summary(about)) + "\n" + captured.get()


@pytest.mark.parametrize("jobs_of", [None, 100])
def test_the_numbers_add_up(tmp_path: Path, jobs_of: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if jobs_of:
        monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", jobs_of)
    old = random_state()
    about = described(tmp_path, old, step(old))
    rows = about["tensors"]
    assert [row["name"] for row in rows] == sorted(TENSORS)
    assert sum(row["changed"] for row in rows) == about["changed_elements"]
    assert sum(row["estimated_bytes"] for row in rows) == pytest.approx(about["size_bytes"] - about["header_bytes"])
    assert all(0 <= row["density"] <= 1 for row in rows)
    assert about["density"] == pytest.approx(about["changed_elements"] / about["total_elements"])
    assert about["bytes_per_change"] == pytest.approx(about["size_bytes"] / about["changed_elements"])
    assert (about["run"], about["epoch"], about["base"]["version"], about["version"]) == ("r", 3, 7, 8)
    assert sum(about["chunks_by_kind"].values()) == about["chunks"]
    json.dumps(about)


def test_the_share_of_steps_of_one_is_counted(tmp_path: Path) -> None:
    old = {"a": torch.randn(4000).bfloat16()}
    bits = old["a"].view(torch.int16).clone()
    bits[:30] += 1
    bits[30:40] += 5
    about = described(tmp_path, old, {"a": bits.view(torch.bfloat16)})
    assert about["unit_step_share"] == pytest.approx(0.75)
    assert about["changed_elements"] == about["sparse_changes"] == 40
    assert "steps of one 75.00%\n" in text_of(about)


def test_the_share_of_steps_of_one_says_what_it_is_of(tmp_path: Path) -> None:
    """Dense chunks do not tell by how much an element changes."""
    old = {"a": torch.zeros(4000).bfloat16(), "b": torch.zeros(4000)}
    bits = torch.zeros(4000, dtype=torch.int16)
    bits[:40] = 1
    about = described(tmp_path, old, {"a": bits.view(torch.bfloat16), "b": torch.randn(4000)})
    assert set(about["chunks_by_kind"]) == {"sparse", "dense"}
    assert about["changed_elements"] > 4000
    assert (about["unit_step_share"], about["sparse_changes"]) == (1.0, 40)
    assert "steps of one 100.00% of 40 changes in sparse chunks\n" in text_of(about)


def test_it_is_shown_in_words(tmp_path: Path) -> None:
    old = random_state()
    about = described(tmp_path, old, step(old))
    text = text_of(about)
    for told in ("version 7 -> 8", "run r, epoch 3", about["base"]["digest"], about["result_digest"], "class-golomb/1"):
        assert told in text
    for name in TENSORS:
        assert name in text
    assert "scalar" in text
    assert "0x8" in text


def test_nothing_changed(tmp_path: Path) -> None:
    old = random_state()
    about = described(tmp_path, old, old)
    assert about["changed_elements"] == 0
    assert about["bytes_per_change"] is None
    assert "in 0 tensors" in text_of(about)


def test_an_anchor(tmp_path: Path) -> None:
    new = save(tmp_path / "new", random_state())
    diff(None, new, tmp_path / "d", Labels("r", 0, 4, None, learner_step=4), threads=1)
    with DeltaFile(tmp_path / "d") as delta:
        text = text_of(describe(delta, threads=1))
    assert "none: a full snapshot" in text
    assert "everything" in text


def test_stages_are_told(tmp_path: Path) -> None:
    old = random_state()
    new = step(old)
    text = text_of(described(tmp_path, old, new, step(new, seed=2)))
    assert "in 2 stages" in text
    assert "added up over the stages" in text


def test_layers_of_a_model_with_very_many_tensors(tmp_path: Path) -> None:
    old = {f"model.layers.{i}.experts.{j}.w": torch.randn(20).bfloat16() for i in range(3) for j in range(20)}
    old["model.embed.weight"] = torch.randn(50).bfloat16()
    old["h2.rotary"] = torch.randn(5)
    about = described(tmp_path, old, step(old, share=0.3))
    what, rows = rows_to_show(about, every=False)
    assert what == "layer"
    assert {row.name for row in rows} == {*(f"model.layers.{i}" for i in range(3)), "model.embed.weight", "h2.rotary"}
    assert sum(row.changed for row in rows) == about["changed_elements"]
    assert sum(row.elements for row in rows) == about["total_elements"]
    assert "model.layers.1 " in text_of(about)
    assert "experts" not in text_of(about)
    assert rows_to_show(about, every=True)[0] == "tensor"
    assert "model.layers.1.experts.19.w" in text_of(about, every=True)


def test_rows_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    old = {f"layers.{i}.w{j}": torch.zeros(2).bfloat16() for i in (0, 1, 2, 10, 11) for j in range(9)}
    old |= {f"{'9' * 5000}.v": torch.zeros(2).bfloat16(), "layers.x": torch.zeros(2).bfloat16()}
    old["layers.\u00b2.w"] = torch.zeros(2).bfloat16()  # a digit that is no number
    about = described(tmp_path, old, step(old))
    names = [row.name for row in rows_to_show(about, every=False)[1]]
    assert names[1:6] == [f"layers.{i}" for i in (0, 1, 2, 10, 11)]
    names = [row.name for row in rows_to_show(about, every=True)[1]]
    assert names.index("layers.2.w8") < names.index("layers.10.w0")


def test_a_name_is_shown_as_it_is_and_commands_nothing(tmp_path: Path) -> None:
    """Neither rich's markup nor what a terminal obeys."""
    hostile = {"w[/bold].x": "w[/bold].x", "[red]v": "[red]v", "\x1b[2Jgone\n": "\\x1b[2Jgone\\n"}
    old = {name: torch.zeros(9).bfloat16() for name in hostile}
    about = described(tmp_path, old, step(old))
    about["run"] = "\x1b[31mr\n\rversion\u202e\x9b"
    shown = text_of(about)
    assert all(f"\n{name} " in shown for name in hostile.values())
    assert "run \\x1b[31mr\\n\\rversion\\u202e\\x9b, epoch 3\n" in shown
    assert not set("\x1b\r\u202e\x9b") & set(shown)
    many = {f"[/b]\x07.{i}.w": torch.zeros(2).bfloat16() for i in range(50)}
    (tmp_path / "many").mkdir()
    assert "[/b]\\x07.7 " in text_of(described(tmp_path / "many", many, step(many)))
