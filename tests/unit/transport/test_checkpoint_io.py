"""Reading and changing pieces of a checkpoint, in every place where a tensor is stored."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.schemas.errors import CheckpointError, TemporaryError
from anabranch.transport import checkpoint_io
from anabranch.transport.checkpoint_files import scan_checkpoint
from anabranch.transport.checkpoint_io import OpenCheckpoint
from tests.checkpoints import load, random_state, raw, save


def opened(path: Path, *, writable: bool = False) -> OpenCheckpoint:
    return OpenCheckpoint(scan_checkpoint(path, refuse=CheckpointError), refuse=CheckpointError, writable=writable)


@pytest.mark.parametrize("shards", [0, 3])
def test_pieces_are_the_bytes_of_the_tensor(tmp_path: Path, shards: int) -> None:
    state = random_state()
    with opened(save(tmp_path / "model", state, shards=shards)) as checkpoint:
        for spec in checkpoint.layout.tensors:
            whole = checkpoint.read(spec.name, 0, spec.numel)
            assert whole.tobytes() == raw(state)[spec.name]
            third = spec.numel // 3
            piece = checkpoint.read(spec.name, third, spec.numel - third)
            assert piece.tobytes() == whole[third : spec.numel - third].tobytes()
            piece[:] = 0  # ours alone
            assert checkpoint.read(spec.name, 0, spec.numel).tobytes() == raw(state)[spec.name]


def test_writes_go_to_their_elements_alone(tmp_path: Path) -> None:
    state = random_state()
    path = save(tmp_path / "model", state, shards=2)
    name = "model.layers.0.a.weight"
    expected = np.frombuffer(raw(state)[name], np.uint16).copy()
    with opened(path, writable=True) as checkpoint:
        checkpoint.write(name, 5, np.arange(7, dtype=np.uint16))
        checkpoint.patch(name, np.array([0, 40, 2111]), np.array([1, 2, 3], np.uint16))
        checkpoint.patch(name, np.array([], np.int64), np.array([], np.uint16))
        checkpoint.write("model.empty", 0, np.array([], np.uint16))
        checkpoint.sync()
    expected[5:12] = np.arange(7)
    expected[[0, 40, 2111]] = [1, 2, 3]
    assert raw(load(path)) == {**raw(state), name: expected.tobytes()}


def test_a_patch_goes_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_io, "_WINDOW_ELEMENTS", 8)
    path = save(tmp_path / "x", {"a": torch.zeros(100, dtype=torch.bfloat16)})
    indices = np.array([0, 7, 8, 9, 31, 98, 99])
    with opened(path, writable=True) as checkpoint:
        checkpoint.patch("a", indices, np.arange(1, 8, dtype=np.uint16))
        expected = np.zeros(100, np.uint16)
        expected[indices] = np.arange(1, 8)
        assert np.array_equal(checkpoint.read("a", 0, 100), expected)


def test_a_tied_copy_follows(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4).bfloat16()
    path = save(
        tmp_path / "model", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, shards=2
    )
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    with opened(path, writable=True) as checkpoint:
        checkpoint.patch("model.embed_tokens.weight", np.array([3]), np.array([9], np.uint16))
    state = raw(load(path))
    assert state["lm_head.weight"] == state["model.embed_tokens.weight"]
    assert np.frombuffer(state["lm_head.weight"], np.uint16)[3] == 9


def test_threads_read_at_once(tmp_path: Path) -> None:
    state = {str(i): torch.full((1000,), i, dtype=torch.int32) for i in range(20)}
    with opened(save(tmp_path / "x", state)) as checkpoint, ThreadPoolExecutor(8) as pool:
        reads = pool.map(lambda i: bool((checkpoint.read(str(i % 20), 3, 900) == i % 20).all()), range(400))
        assert all(reads)


def test_a_file_that_is_cut_short_meanwhile_is_a_named_error(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.zeros(100)})
    with opened(path) as checkpoint:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="shorter"):
            checkpoint.read("a", 0, 100)


def test_a_writer_is_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.zeros(3)})
    with opened(path), opened(path), pytest.raises(TemporaryError, match="wait"):
        opened(path, writable=True)
    with opened(path, writable=True):
        with pytest.raises(TemporaryError, match="changing it"):
            opened(path)
        with pytest.raises(TemporaryError, match="changing it"):
            opened(path, writable=True)
    opened(path, writable=True).close()
