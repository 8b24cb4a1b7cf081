"""Where the tensors of a file or folder lie, as the safetensors package sees it, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anabranch.schemas.errors import CheckpointError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_files import (
    CheckpointFiles,
    first_difference,
    journal_path,
    read_header,
    scan_checkpoint,
    single_file_header,
)
from tests.checkpoints import TENSORS, load, random_state, raw, save


def scan(path: Path) -> CheckpointFiles:
    return scan_checkpoint(path, refuse=CheckpointError)


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_tensor_is_found_where_it_is(tmp_path: Path, shards: int) -> None:
    state = random_state()
    found = scan(save(tmp_path / "model", state, shards=shards))
    assert {name: at[0].read().tobytes() for name, at in found.places.items()} == raw(state)
    assert len(found.files) == max(shards, 1)
    assert found.is_folder == (shards > 0)
    assert [(t.name, t.shape) for t in found.layout.tensors] == [(n, TENSORS[n][1]) for n in sorted(TENSORS)]


def test_a_folder_and_a_file_with_the_same_tensors_have_one_layout(tmp_path: Path) -> None:
    state = random_state()
    layouts = [scan(save(tmp_path / str(n), state, shards=n)).layout for n in (0, 1, 2)]
    assert layouts[0] == layouts[1] == layouts[2]


def test_a_tied_copy_is_a_second_place_of_the_embedding_in_a_folder_only(tmp_path: Path) -> None:
    embedding = torch.randn(600, 4).bfloat16()
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone(), "z": torch.zeros(1)}
    folder = save(tmp_path / "folder", both, shards=3)
    assert len(scan(folder).layout.tensors) == 3
    for config in ({"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}):
        (folder / "config.json").write_text(json.dumps(config))
        places = scan(folder).places
        assert set(places) == {"z", "model.embed_tokens.weight"}
        assert [at.name for at in places["model.embed_tokens.weight"]] == [
            "model.embed_tokens.weight",
            "lm_head.weight",
        ]
    assert len(scan(save(tmp_path / "file", both)).layout.tensors) == 3


def test_tied_copies_that_differ_are_refused(tmp_path: Path) -> None:
    both = {"model.embed_tokens.weight": torch.zeros(9_000_000, dtype=torch.bfloat16)}
    both["lm_head.weight"] = both["model.embed_tokens.weight"].clone()
    both["lm_head.weight"][-1] = 1  # beyond the first piece that is compared
    folder = save(tmp_path / "folder", both, shards=1)
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(CheckpointError, match="differ"):
        scan(folder)
    assert scan_checkpoint(folder, refuse=CheckpointError, half_applied=True).layout
    save_file({**both, "lm_head.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="differ"):
        scan_checkpoint(folder, refuse=CheckpointError, half_applied=True)


def test_a_tensor_in_two_shards_or_in_none_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", random_state(), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load(second), "model.buffer.mask": torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=r"model\.buffer\.mask.* is in .*00001.* and .*00002"):
        scan(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match="there is no model-00002"):
        scan(folder)
    index["weight_map"] = {"nobody": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'nobody'"):
        scan(folder)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 10**5, '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x00"])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "folder", random_state(), shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        scan(folder)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere.safetensors", random_state())
    (tmp_path / "folder").mkdir()
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no elsewhere\.safetensors in it"):
        scan(tmp_path / "folder")


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4], **changes}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"a": entry(), "b": entry()}, "over another"),
        ({"a": entry(), "b": entry(data_offsets=[2, 6])}, "over another"),
        ({"a": entry(data_offsets=[8, 12])}, r"cut short: \d+ bytes where \d+ belong"),
        ({"a": entry(data_offsets=[-4, 0])}, "size"),
        ({"a": entry(data_offsets=[4, 0])}, "bytes"),
        ({"a": entry(shape=[3])}, "bytes"),
        ({"a": entry(shape=[-2])}, "size"),
        ({"a": entry(shape=[2.0])}, "size"),
        ({"a": entry(shape=["2"])}, "size"),
        ({"a": entry(shape=2)}, "not iterable"),
        ({"a": entry(dtype="F4")}, "'F4'; known"),
        ({"a": {}}, "data_offsets"),
        ({"a": 3}, "'a' is not described by a JSON object"),
        ([], "header is not a JSON object"),
        (None, "header is not a JSON object"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: object, told: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=told):
        read_header(tmp_path / "x", refuse=CheckpointError)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="readable"):
        read_header(tmp_path / "x", refuse=CheckpointError)


def test_a_file_that_is_cut_short_is_told_so(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole", random_state()).read_bytes()
    for size in (0, 7, 8, 100, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"x is not .* cut short: {size} bytes where \d+ belong"):
            scan(tmp_path / "x")


def test_an_index_that_cannot_be_opened_is_an_oserror_as_a_shard_is(tmp_path: Path) -> None:
    (tmp_path / "folder" / "model.safetensors.index.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        scan(tmp_path / "folder")


def test_a_checkpoint_with_a_pending_change_is_refused(tmp_path: Path) -> None:
    for path in (save(tmp_path / "file", random_state()), save(tmp_path / "folder", random_state(), shards=1)):
        journal_path(path).write_bytes(b"")
        assert journal_path(path).parent == (path if path.is_dir() else path.parent)
        with pytest.raises(CheckpointError, match="half changed"):
            scan(path)


def test_a_pending_change_is_noticed_by_every_name(tmp_path: Path) -> None:
    file = save(tmp_path / "file", random_state())
    folder = save(tmp_path / "folder", random_state(), shards=2)
    names = [tmp_path / "link", tmp_path / "cache", tmp_path / "linked"]
    names[0].symlink_to(file)
    names[1].mkdir()  # a folder of links to files elsewhere
    (names[1] / "model.safetensors").symlink_to("../file")
    names[2].symlink_to(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    (tmp_path / "shard").symlink_to(shard)
    whole = [file, folder, shard, *names, tmp_path / "shard"]
    for path in whole:
        scan(path)
    for path in (file, folder):
        journal_path(path).write_bytes(b"")
    for path in whole:
        with pytest.raises(CheckpointError, match="half changed"):
            scan(path)
    beside = save(folder / "other.safetensors", random_state())
    assert scan(beside).layout  # it is no part of what the journal is of


def test_a_pending_change_of_one_shard_is_noticed_in_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", random_state(), shards=2)
    journal_path(folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="half changed"):
        scan(folder)
    assert scan(folder / "model-00001-of-00002.safetensors").layout


def test_links_that_lead_in_a_circle_are_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        scan(tmp_path / "a")


def test_a_header_of_our_own_is_one_that_the_package_reads(tmp_path: Path) -> None:
    state = random_state()
    layout = scan(save(tmp_path / "theirs", state)).layout
    header = single_file_header(layout)
    (tmp_path / "ours").write_bytes(header + bytes(layout.payload_bytes))
    zeros = load(tmp_path / "ours")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in zeros.items()} == TENSORS
    assert not any(t.view(torch.uint8).any() for t in zeros.values() if t.numel() and t.dim())
    assert scan(tmp_path / "ours").layout == layout
    assert len(header) % 8 == 0


def test_the_first_difference_is_told() -> None:
    ours = Layout.build([("a", "bf16", (2,)), ("b", "bf16", (2,))])
    assert first_difference(ours, ours, here="X", there="Y") is None
    for other, told in [
        ([("a", "bf16", (2,))], "tensor 'b' is missing from Y"),
        ([("a", "bf16", (2,)), ("b", "bf16", (2,)), ("c", "u8", ())], "tensor 'c' is not in X"),
        ([("a", "bf16", (2, 1)), ("b", "f32", (2,))], "tensor 'a' is bf16[2] in X, bf16[2, 1] in Y"),
    ]:
        assert first_difference(ours, Layout.build(other), here="X", there="Y") == told
