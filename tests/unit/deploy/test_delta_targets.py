"""What `anabranch delta` may replace, and what it may not: nothing is lost that nobody named."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_merge import merge
from anabranch.schemas.errors import UsageError
from tests.checkpoints import load, random_state, raw, save
from tests.unit.deploy.test_delta_apply import LABELS, everything, in_place, prepare, to_new


def refused(folder: Path, match: str, attempt: Callable[[], object]) -> None:
    before = everything(folder), sorted(os.listdir(folder))
    with pytest.raises(UsageError, match=match):
        attempt()
    assert (everything(folder), sorted(os.listdir(folder))) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("inside", ["old", "d"])
def test_a_folder_that_holds_an_input_is_not_replaced(tmp_path: Path, inside: str, force: bool) -> None:
    old, file, _ = prepare(tmp_path, shards=2)
    box = save(tmp_path / "box", random_state(), shards=1)
    shutil.move(tmp_path / inside, box / inside)
    old, file = (box / "old" if inside == "old" else old), (box / "d" if inside == "d" else file)
    refused(tmp_path, "holds", lambda: to_new(old, file, box, force=force))
    (tmp_path / "link").symlink_to(box)
    refused(tmp_path, "holds", lambda: to_new(old, file, tmp_path / "link", force=True))
    away = tmp_path / "away"  # an input named through a link that lies in the folder
    shutil.move(box / inside, away)
    (box / inside).symlink_to(away)
    refused(tmp_path, "holds", lambda: to_new(old, file, box, force=True))


def test_a_folder_that_holds_the_weights_which_old_links_to_is_not_replaced(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    out = tmp_path / "out"
    out.mkdir()
    shutil.move(old / "model.safetensors", out / "model.safetensors")
    (old / "model.safetensors").symlink_to("../out/model.safetensors")
    refused(tmp_path, "holds", lambda: to_new(old, file, out, force=True))


@pytest.mark.parametrize("shards", [0, 2])
def test_an_input_is_not_replaced(tmp_path: Path, shards: int) -> None:
    old, file, _ = prepare(tmp_path, shards=shards)
    refused(tmp_path, "--in-place", lambda: to_new(old, file, old, force=True))
    refused(tmp_path, "is an input", lambda: to_new(old, file, file, force=True))
    (tmp_path / "link").symlink_to(file)
    refused(tmp_path, "is an input", lambda: to_new(old, file, tmp_path / "link", force=True))


def test_an_anchor_is_not_replaced_by_what_it_makes(tmp_path: Path) -> None:
    _, file, _ = prepare(tmp_path, anchor=True)
    refused(tmp_path, "is an input", lambda: to_new(None, file, file, force=True))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", [".", "..", "../..", "{}", "{}/.."])
def test_the_working_directory_is_not_replaced(
    tmp_path: Path, name: str, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    work = save(tmp_path / "work", random_state(), shards=1)
    monkeypatch.chdir(work)
    refused(tmp_path, "working directory|holds", lambda: to_new(old, file, Path(name.format(work)), force=force))


def test_force_replaces_no_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    refused(tmp_path, "not a checkpoint", lambda: to_new(old, file, tmp_path / "thesis", force=True))


def test_force_replaces_no_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    old, file, state = prepare(tmp_path)
    for name, content in (("thesis", b"chapter 1"), ("7.delta", file.read_bytes()), ("short", b"\0")):
        (tmp_path / name).write_bytes(content)
        refused(
            tmp_path, "not a readable safetensors", lambda name=name: to_new(old, file, tmp_path / name, force=True)
        )
    (tmp_path / "empty").touch()
    to_new(old, file, tmp_path / "empty", force=True)
    assert raw(load(tmp_path / "empty")) == raw(state)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device needs root")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(
    tmp_path: Path, make: Callable[[Path], None], linked: bool
) -> None:
    old, file, _ = prepare(tmp_path)
    make(tmp_path / "node")
    node, mode = tmp_path / "node", (tmp_path / "node").stat().st_mode
    if linked:
        node = tmp_path / "link"
        node.symlink_to("node")
    special = "not a regular file"
    for attempt in (
        lambda: to_new(old, file, node, force=True),
        lambda: diff(old, old, node, LABELS, threads=1),
        lambda: merge([file], node, base=None, threads=1),
        lambda: to_new(old, node, tmp_path / "out"),
        lambda: to_new(node, file, tmp_path / "out"),
        lambda: in_place(node, file),
        lambda: diff(node, old, tmp_path / "e", LABELS, threads=1),
        lambda: merge([node, file], tmp_path / "e", base=None, threads=1),
        lambda: merge([file], tmp_path / "e", base=node, threads=1),
    ):
        refused_special(tmp_path, special, attempt)
    assert (tmp_path / "node").stat().st_mode == mode


def refused_special(folder: Path, match: str, attempt: Callable[[], object]) -> None:
    before = sorted(os.listdir(folder))
    with pytest.raises(UsageError, match=match):
        attempt()
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", ".anabranch-apply"])
def test_a_checkpoint_with_a_pipe_in_it_is_refused(tmp_path: Path, name: str) -> None:
    old, file, _ = prepare(tmp_path, shards=1)
    (old / name).unlink(missing_ok=True)
    os.mkfifo(old / name)
    for attempt in (lambda: to_new(old, file, tmp_path / "out"), lambda: in_place(old, file)):
        refused_special(tmp_path, "not a regular file", attempt)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, shards: int) -> None:
    old, file, state = prepare(tmp_path, shards=shards)
    (tmp_path / "disk").mkdir()
    real = save(tmp_path / "disk" / "real", random_state(5), shards=shards)
    link = tmp_path / "link"
    link.symlink_to("disk/real")
    refused(tmp_path, "--force", lambda: to_new(old, file, link))
    to_new(old, file, link, force=True)
    assert os.readlink(link) == "disk/real"
    assert not real.is_symlink()
    assert raw(load(real)) == raw(state)
    assert os.listdir(tmp_path / "disk") == ["real"]
