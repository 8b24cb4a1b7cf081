"""Applying a delta file: the exact result in the old form, and nothing written of what does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from anabranch.deploy.delta_apply import Applied, apply_in_place, apply_to_new
from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels, make_manifest
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.delta_file import DeltaHeader
from anabranch.schemas.errors import DeltaError, ManifestError, TemporaryError, UsageError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_files import journal_path, scan_checkpoint
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.delta_file import DeltaFile, DeltaWriter
from tests.checkpoints import State, load, random_state, raw, save, step
from tests.limits import file_size_limit

LABELS = Labels("r", 0, 1, 0, learner_step=1)
ANCHOR = Labels("r", 0, 1, None, learner_step=1)


@pytest.fixture(autouse=True)
def _several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 700)


def prepare(
    folder: Path, *, shards: int = 0, anchor: bool = False, state: State | None = None
) -> tuple[Path, Path, State]:
    """OLD, the delta file, and the state that is to result."""
    before = state or random_state()
    after = step(before)
    old = save(folder / "old", before, shards=shards)
    new = save(folder / "new.safetensors", after)
    diff(None if anchor else old, new, folder / "d", ANCHOR if anchor else LABELS, threads=2)
    new.unlink()
    return old, folder / "d", after


def to_new(old: Path | None, file: Path, out: Path, *, force: bool = False) -> Applied:
    with DeltaFile(file) as delta:
        return apply_to_new(old, delta, out, force=force, threads=2)


def in_place(old: Path, file: Path) -> Applied:
    with DeltaFile(file) as delta:
        return apply_in_place(old, delta, threads=2)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_the_result_has_the_old_form(tmp_path: Path, shards: int, anchor: bool) -> None:
    old, file, state = prepare(tmp_path, shards=shards, anchor=anchor)
    expected = save(tmp_path / "expected", state, shards=shards)
    assert to_new(old, file, tmp_path / "out").how == "written"
    if shards:
        assert everything(tmp_path / "out") == everything(expected)
    else:
        assert (tmp_path / "out").read_bytes() == expected.read_bytes()
    assert in_place(old, file).how == "changed"
    assert everything(old) == everything(expected)
    assert old.is_dir() or old.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(("written", "read"), [(1000, 700), (700, 1000), (4000, 1000), (1000, 4000), (999, 1000)])
def test_a_file_may_be_cut_otherwise_than_the_reader_would(
    tmp_path: Path, written: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", written)
    old, file, state = prepare(tmp_path, shards=2)
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", read)
    to_new(old, file, tmp_path / "out")
    in_place(old, file)
    assert raw(load(tmp_path / "out")) == raw(load(old)) == raw(state)


def test_a_file_is_no_base_of_another_model(tmp_path: Path) -> None:
    _, file, _ = prepare(tmp_path)
    other = save(tmp_path / "other", {"a": torch.zeros(3)})
    before = everything(tmp_path)
    for attempt in (lambda: to_new(other, file, tmp_path / "out"), lambda: in_place(other, file)):
        with pytest.raises(DeltaError, match="another model: tensor 'a' is missing"):
            attempt()
    assert everything(tmp_path) == before


def test_another_base_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file, _ = prepare(tmp_path, shards=2)
    other = save(tmp_path / "other", step(random_state(), seed=9), shards=2)
    before = everything(tmp_path)
    for name in ("write", "pwrite", "posix_fallocate", "mkdir", "rename", "ftruncate"):
        monkeypatch.setattr(os, name, never)
    for attempt in (lambda: to_new(other, file, tmp_path / "out"), lambda: in_place(other, file)):
        with pytest.raises(DeltaError, match=r"other has digest .*, .*d applies to"):
            attempt()
    monkeypatch.undo()
    assert everything(tmp_path) == before


def never(*_: object) -> None:
    raise AssertionError("a byte was written")


def test_a_base_that_is_the_result_already(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path)
    in_place(old, file)
    before = everything(tmp_path)
    assert in_place(old, file).how == "already"
    with pytest.raises(DeltaError, match="already what the delta makes"):
        to_new(old, file, tmp_path / "out")
    assert everything(tmp_path) == before


def test_any_damaged_byte_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, state={"a": torch.randn(40).bfloat16()})
    whole = file.read_bytes()
    before = everything(tmp_path)
    for position in range(len(whole)):
        for damaged in (whole[:position], whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]):
            file.write_bytes(damaged)
            for attempt in (lambda: to_new(old, file, tmp_path / "out"), lambda: in_place(old, file)):
                with pytest.raises((DeltaError, ManifestError)):
                    attempt()
    file.write_bytes(whole)
    assert everything(tmp_path) == before


def test_any_damage_under_right_digests_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """As somebody would make it who means harm: the chunk is wrong, its digest and the header's are right."""
    old, file, state = prepare(tmp_path, state={"a": torch.randn(200).bfloat16()})
    with DeltaFile(file) as delta:
        header, chunk = delta.header, delta.chunk(0)
    before = everything(tmp_path)
    told: list[str] = []
    for position in range(len(chunk)):
        for bad in (chunk[:position], *(flipped(chunk, position, bit) for bit in (0, 3, 7))):
            with DeltaWriter(file) as writer:
                writer.add([bad])
                manifest = header.manifest.model_copy(update={"chunks": tuple(writer.chunks)})
                writer.finish(dataclasses.replace(header, manifest=manifest))
            for attempt in (lambda: to_new(old, file, tmp_path / "out"), lambda: in_place(old, file)):
                try:
                    attempt()
                except DeltaError as error:
                    told.append(str(error))
                else:  # padding bits may say what they like
                    made = tmp_path / "out" if (tmp_path / "out").exists() else old
                    assert raw(load(made)) == raw(state)
                    made.write_bytes(before["old"])
                    (tmp_path / "out").unlink(missing_ok=True)
    assert all(str(file) in line or "what was written" in line for line in told)
    assert len(told) > 7 * len(chunk)
    file.write_bytes(before["d"])
    assert everything(tmp_path) == before


def flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def test_a_delta_that_does_not_make_what_it_says_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, file, _ = prepare(tmp_path)
    before = everything(tmp_path)
    with DeltaFile(file) as delta:
        manifest = delta.header.manifest.model_copy(update={"result_digest": "0" * 32})
        object.__setattr__(delta.header, "manifest", manifest)
        with pytest.raises(DeltaError, match="says that it would have 0000"):
            apply_in_place(old, delta, threads=2)
        with pytest.raises(DeltaError, match="what was written has digest"):
            apply_to_new(old, delta, tmp_path / "out", force=False, threads=2)
    assert everything(tmp_path) == before


def test_an_existing_checkpoint_is_replaced_only_by_force(tmp_path: Path) -> None:
    for shards in (0, 2):
        folder = tmp_path / str(shards)
        folder.mkdir()
        old, file, state = prepare(folder, shards=shards)
        save(folder / "out", random_state(5), shards=shards)
        before = everything(folder)
        with pytest.raises(UsageError, match="--force"):
            to_new(old, file, folder / "out")
        assert everything(folder) == before
        to_new(old, file, folder / "out", force=True)
        assert raw(load(folder / "out")) == raw(state)
        assert sorted(os.listdir(folder)) == ["d", "old", "out"]


def test_a_copy_cannot_be_inside_its_original(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    with pytest.raises(UsageError, match="inside"):
        to_new(old, file, old / "out")


def test_a_delta_alone_makes_nothing(tmp_path: Path) -> None:
    _, file, _ = prepare(tmp_path)
    with pytest.raises(UsageError, match="applies to a checkpoint"):
        to_new(None, file, tmp_path / "out")


def test_tied_copies_change_together(tmp_path: Path) -> None:
    embedding = torch.randn(60, 16).bfloat16()
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone(), "z": torch.zeros(3)}
    old = save(tmp_path / "old", state, shards=2)
    (old / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    after = step({n: t for n, t in state.items() if n != "lm_head.weight"})
    new = save(tmp_path / "new", after, shards=1)
    diff(old, new, tmp_path / "d", LABELS, threads=1)
    to_new(old, tmp_path / "d", tmp_path / "out")
    in_place(old, tmp_path / "d")
    for made in (old, tmp_path / "out"):
        assert raw(load(made)) == raw({**after, "lm_head.weight": after["model.embed_tokens.weight"]})


def test_a_full_disk_leaves_the_old_and_nothing_else(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path)
    before = everything(tmp_path)

    def fill(attempt: str) -> None:
        with file_size_limit(500):
            if attempt == "new":
                to_new(old, file, tmp_path / "out")
            in_place(old, file)

    for attempt in ("new", "in place"):
        with pytest.raises(OSError, match="too large"):
            fill(attempt)
        assert everything(tmp_path) == before


def test_an_anchor_that_only_declares_a_model_is_refused_before_room_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """276 bytes on the disk, 2 GiB if they were believed."""
    layout = Layout.build([("a", "u8", (2**31,))])
    manifest = make_manifest(ANCHOR, layout, (None, "0" * 32), (), 2**31)
    (tmp_path / "d").write_bytes(DeltaHeader(manifest, layout, (2**31,), (0,)).pack())
    monkeypatch.setattr(os, "posix_fallocate", never)
    with pytest.raises(DeltaError, match=f"an anchor of {2**31} elements, but its chunks hold 0"):
        to_new(None, tmp_path / "d", tmp_path / "out")
    assert os.listdir(tmp_path) == ["d"]


def test_only_one_changes_a_checkpoint_at_a_time(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, shards=2)
    files = scan_checkpoint(old, refuse=DeltaError)
    with OpenCheckpoint(files, refuse=DeltaError), pytest.raises(TemporaryError, match="wait"):
        in_place(old, file)
    with OpenCheckpoint(files, refuse=DeltaError, writable=True), pytest.raises(TemporaryError, match="wait"):
        to_new(old, file, tmp_path / "out")
    in_place(old, file)


def test_a_link_is_not_changed_in_place(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    os.link(old / "model.safetensors", tmp_path / "second name")
    with pytest.raises(UsageError, match="second name"):
        in_place(old, file)
    (old / "model.safetensors").unlink()
    (old / "model.safetensors").symlink_to("../second name")
    with pytest.raises(UsageError, match="link"):
        in_place(old, file)
    to_new(old, file, tmp_path / "out")


def test_a_journal_of_another_delta_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, file, state = prepare(tmp_path)
    new = save(tmp_path / "new", step(state, seed=3))
    diff(old, new, tmp_path / "other.delta", LABELS, threads=1)
    monkeypatch.setattr("anabranch.deploy.delta_apply._redo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_place(old, file)
    monkeypatch.undo()
    assert journal_path(old).exists()
    with pytest.raises(DeltaError, match=r"another delta \(d, to digest .*end it first"):
        in_place(old, tmp_path / "other.delta")
    with pytest.raises(DeltaError, match="half changed"):
        to_new(old, file, tmp_path / "out")
    with pytest.raises(DeltaError, match="half changed"):
        diff(old, new, tmp_path / "e", LABELS, threads=1)
    assert in_place(old, file).how == "finished"
    assert raw(load(old)) == raw(state)
    assert not journal_path(old).exists()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_damaged_journal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, file, state = prepare(tmp_path, state={"a": torch.randn(40).bfloat16()})
    untouched = old.read_bytes()
    monkeypatch.setattr("anabranch.deploy.delta_apply._redo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_place(old, file)
    monkeypatch.undo()
    journal = journal_path(old)
    whole = journal.read_bytes()
    for position in range(len(whole)):
        for damaged in (whole[:position], whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]):
            journal.write_bytes(damaged)
            with pytest.raises(DeltaError, match="damaged"):
                in_place(old, file)
    journal.write_bytes(whole)
    old.write_bytes(untouched)  # the base again, as from a copy: the journal is absolute
    assert in_place(old, file).how == "finished"
    assert raw(load(old)) == raw(state)
