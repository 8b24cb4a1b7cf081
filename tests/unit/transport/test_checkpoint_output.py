"""A new checkpoint has the form of the old one: headers, metadata, shards, other files, and nothing that would be stale."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from anabranch.schemas.errors import CheckpointError, TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_files import CheckpointFiles, scan_checkpoint, single_file_header
from anabranch.transport.checkpoint_output import copy_form, single_file_form, take_room
from tests.checkpoints import TENSORS, load, random_state, save
from tests.limits import file_size_limit


def scan(path: Path, *, half_applied: bool = False) -> CheckpointFiles:
    return scan_checkpoint(path, refuse=CheckpointError, half_applied=half_applied)


def zeroed(path: Path) -> bytes:
    """The file with its tensors set to zero."""
    content = bytearray(path.read_bytes())
    for places in scan(path).places.values():
        for place in places:
            content[place.offset_bytes : place.offset_bytes + place.size_bytes] = bytes(place.size_bytes)
    return bytes(content)


def test_a_file_keeps_everything_but_its_tensors(tmp_path: Path) -> None:
    old = save(tmp_path / "old", random_state(), metadata={"format": "pt", "step": "7"})
    old.chmod(0o640)
    assert copy_form(scan(old), tmp_path / "new") == []
    assert (tmp_path / "new").read_bytes() == zeroed(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    with safe_open(tmp_path / "new", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "7"}


def test_bytes_between_and_after_tensors_are_kept(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [9, 12]},
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "empty": {"dtype": "U8", "shape": [0], "data_offsets": [6, 6]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "old").write_bytes(struct.pack("<Q", len(text)) + text + b"gap.TT---TTTend")
    copy_form(scan(tmp_path / "old"), tmp_path / "new")
    assert (tmp_path / "new").read_bytes()[8 + len(text) :] == b"gap.\0\0---\0\0\0end"


def test_a_folder_keeps_its_shards_and_its_other_files(tmp_path: Path) -> None:
    old = save(tmp_path / "old", random_state(), shards=3)
    (old / "chat").mkdir()
    (old / "chat" / "template.jinja").write_text("{{ x }}")
    for stale in ("pytorch_model.bin", "consolidated.safetensors", "chat/model.gguf"):
        (old / stale).write_bytes(b"other weights")
    for hidden in (".git", ".cache"):
        (old / hidden).mkdir()
        (old / hidden / "x").write_bytes(b"x")
    (tmp_path / "new").mkdir()
    left_out = copy_form(scan(old), tmp_path / "new")
    assert sorted(left_out) == ["chat/model.gguf", "consolidated.safetensors", "pytorch_model.bin"]
    new = tmp_path / "new"
    shards = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(new)) == sorted(
        ["chat", "config.json", "tokenizer.json", "model.safetensors.index.json", *shards]
    )
    for name in ("config.json", "tokenizer.json", "chat/template.jinja", "model.safetensors.index.json"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
    for name in shards:
        assert (new / name).read_bytes() == zeroed(old / name)


def test_what_shards_are_links_to_is_copied(tmp_path: Path) -> None:
    """As a folder of the Hugging Face cache has them."""
    old = save(tmp_path / "old", random_state(), shards=1)
    (old / "model.safetensors").rename(tmp_path / "blob")
    (old / "model.safetensors").symlink_to("../blob")
    (tmp_path / "new").mkdir()
    copy_form(scan(old), tmp_path / "new")
    assert not (tmp_path / "new" / "model.safetensors").is_symlink()
    assert scan(tmp_path / "new").layout == scan(old).layout


def test_a_tied_copy_is_left_to_be_written(tmp_path: Path) -> None:
    embedding = torch.ones(6, 4).bfloat16()
    old = save(
        tmp_path / "old", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, shards=1
    )
    (old / "config.json").write_text('{"tie_word_embeddings": true}')
    (tmp_path / "new").mkdir()
    copy_form(scan(old), tmp_path / "new")
    assert not any(t.any() for t in load(tmp_path / "new").values())
    assert len(scan(tmp_path / "new", half_applied=True).places["model.embed_tokens.weight"]) == 2


def test_one_file_of_a_layout(tmp_path: Path) -> None:
    layout = scan(save(tmp_path / "old", random_state())).layout
    single_file_form(layout, tmp_path / "new")
    assert scan(tmp_path / "new").layout == layout
    assert {name: tuple(t.shape) for name, t in load(tmp_path / "new").items()} == {
        n: s for n, (_, s) in TENSORS.items()
    }


def test_room_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large() -> None:
        with (tmp_path / "x").open("wb") as file, file_size_limit(1000):
            take_room(file.fileno(), 2000)

    with pytest.raises(OSError, match="too large"):
        too_large()
    with (tmp_path / "x").open("wb") as file:
        take_room(file.fileno(), 1_000_000)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1_000_000
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with (tmp_path / "y").open("wb") as file:
        take_room(file.fileno(), 1000)
    assert (tmp_path / "y").stat().st_size == 1000


def refuse(*_: object) -> None:
    raise OSError(95, "Operation not supported")


def test_without_room_for_all_of_it_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that declares more than the disk has, and a copy that nearly fits."""
    huge = Layout.build([("w", "u8", (2**45,))])
    size = len(single_file_header(huge)) + 2**45
    with pytest.raises(TemporaryError, match=f"no room in {tmp_path}: {size:,} bytes are needed"):
        single_file_form(huge, tmp_path / "huge")
    old = save(tmp_path / "old", random_state(), shards=2)
    needed = sum(path.stat().st_size for path in old.glob("*.safetensors"))
    (tmp_path / "new").mkdir()
    for free, blocks, fits in (
        (needed - 1, 10**9, False),
        (needed, 10**9, True),
        (0, 0, True),
    ):  # 0 blocks: it cannot tell
        there = SimpleNamespace(f_frsize=1, f_bavail=free, f_bfree=free, f_blocks=blocks)
        monkeypatch.setattr(os, "statvfs", lambda _, there=there: there)
        if fits:
            copy_form(scan(old), tmp_path / "new")
        else:
            with pytest.raises(TemporaryError, match=f"{needed:,} bytes are needed, {free:,} are free"):
                copy_form(scan(old), tmp_path / "new")
            assert os.listdir(tmp_path / "new") == []
    assert not (tmp_path / "huge").exists()
