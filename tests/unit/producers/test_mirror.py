"""The host mirror: what it holds, what it digests, what it refuses and what it leaves behind (nothing)."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anabranch.kernels.delta_codec import TensorChange
from anabranch.kernels.digest import tensor_digest
from anabranch.producers.mirror import Mirror, layout_of_checkpoint, map_shared
from anabranch.schemas.errors import DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout, root_digest

LAYOUT = Layout.build([("a", "bf16", (3, 5)), ("b", "f32", (4,)), ("c", "u8", (7,))])


@pytest.fixture
def mirror() -> Mirror:
    return Mirror(LAYOUT)


def _checkpoint(model_dir: Path, tensors: dict[str, torch.Tensor], *, tied: bool = False) -> Path:
    model_dir.mkdir(exist_ok=True)
    save_file(tensors, model_dir / "model.safetensors")
    (model_dir / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return model_dir


def _of_bytes(mirror: Mirror) -> str:
    return root_digest(
        mirror.layout, {t.name: tensor_digest(mirror.tensor_bytes(t.name)) for t in mirror.layout.tensors}
    )


def test_incremental_digest_equals_one_taken_from_scratch(mirror: Mirror) -> None:
    rng = np.random.default_rng(0)
    seen = {mirror.digest()}
    for _ in range(5):
        mirror.write("a", np.array([1, 14]), rng.integers(0, 2**16, 2).astype(np.uint16))
        mirror.write("b", None, rng.integers(0, 2**32, 4).astype(np.uint32))
        assert mirror.digest() == _of_bytes(mirror)
        seen.add(mirror.digest())
    assert len(seen) == 6


def test_touch_announces_a_write_through_a_view(mirror: Mirror) -> None:
    before = mirror.digest()
    mirror.tensor_bits("c")[0] = 1
    mirror.touch("c")
    assert mirror.digest() == _of_bytes(mirror) != before


def test_bits_are_stored_untouched() -> None:
    layout = Layout.build([("x", "bf16", (4,))])
    odd = np.array([0x8000, 0x7FC1, 0xFF81, 0x0001], np.uint16)  # -0.0, NaN with payload, signalling NaN, denormal
    mirror = Mirror(layout)
    mirror.write("x", None, odd)
    assert mirror.tensor_bytes("x").tobytes() == odd.tobytes()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (TensorChange("nobody", None, np.zeros(1, np.uint16)), ModelMismatchError),
        (TensorChange("a", None, np.zeros(16, np.uint16)), DeltaError),
        (TensorChange("a", None, np.zeros(2, np.uint16), start=14), DeltaError),
        (TensorChange("a", None, np.zeros(2, np.uint16), start=-1), DeltaError),
        (TensorChange("a", None, np.zeros(15, np.uint32)), DeltaError),
        (TensorChange("a", np.array([15]), np.zeros(1, np.uint16)), DeltaError),
        (TensorChange("a", np.array([-1]), np.zeros(1, np.uint16)), DeltaError),
        (TensorChange("a", np.array([1, 2]), np.zeros(1, np.uint16)), DeltaError),
    ],
)
def test_a_bad_change_is_refused_before_anything_is_written(
    mirror: Mirror, change: TensorChange, error: type[Exception]
) -> None:
    good = TensorChange("b", None, np.ones(4, np.uint32))
    with pytest.raises(error):
        mirror.apply([good, change])
    assert not mirror.image.any()


def test_another_process_reads_it_and_sees_later_writes(mirror: Mirror) -> None:
    reader = (
        "import sys; from anabranch.producers.mirror import map_shared;"
        "image = map_shared(sys.argv[1], int(sys.argv[2])); image[1] = 9;"  # a private write: stays over there
        "print(bytes(image[:2]).hex())"
    )
    mirror.tensor_bytes("a")[:2] = [0xAB, 0xCD]
    command = [sys.executable, "-I", "-c", reader, mirror.path, str(LAYOUT.mirror_bytes)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "ab09"
    assert mirror.tensor_bytes("a")[1] == 0xCD
    here = map_shared(mirror.path, LAYOUT.mirror_bytes)
    mirror.tensor_bytes("a")[0] = 1
    assert here[0] == 1


def test_a_mirror_that_is_gone_or_too_small_is_refused(mirror: Mirror) -> None:
    path = mirror.path
    with pytest.raises(DeltaError, match="smaller"):
        map_shared(path, LAYOUT.mirror_bytes + 1)
    mirror.close()
    with pytest.raises(DeltaError, match="cannot be opened"):
        map_shared(path, LAYOUT.mirror_bytes)


def test_it_reads_a_checkpoint_and_its_shards(tmp_path: Path) -> None:
    tensors = {
        "model.a": torch.randn(3, 5).bfloat16(),
        "model.b": torch.randn(4),
        "model.c": torch.randint(-9, 9, (2, 2)),
    }
    whole = Mirror.from_checkpoint(_checkpoint(tmp_path / "whole", tensors))
    assert [(t.name, t.dtype, t.shape) for t in whole.layout.tensors] == [
        ("model.a", "bf16", (3, 5)),
        ("model.b", "f32", (4,)),
        ("model.c", "i64", (2, 2)),
    ]
    for name, tensor in tensors.items():
        assert whole.tensor_bytes(name).tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()

    sharded = tmp_path / "sharded"
    sharded.mkdir()
    files = {"model.a": "1.safetensors", "model.b": "2.safetensors", "model.c": "2.safetensors"}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert Mirror.from_checkpoint(sharded).digest() == whole.digest()
    assert layout_of_checkpoint(sharded) == whole.layout

    save_file({"model.c": tensors["model.c"]}, sharded / "2.safetensors")
    with pytest.raises(ModelMismatchError, match=r"model\.b"):
        layout_of_checkpoint(sharded)


def test_tied_embeddings_appear_once(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4).bfloat16()
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert list(layout_of_checkpoint(_checkpoint(tmp_path / "t", both, tied=True)).by_name) == [
        "model.embed_tokens.weight"
    ]
    assert len(layout_of_checkpoint(_checkpoint(tmp_path / "u", both, tied=False)).tensors) == 2
    both["lm_head.weight"][0, 0] += 1
    with pytest.raises(ModelMismatchError, match="differ"):
        layout_of_checkpoint(_checkpoint(tmp_path / "d", both, tied=True))


@pytest.mark.parametrize(
    "damage",
    [b"", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}'],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ModelMismatchError, match=r"model\.safetensors"):
        layout_of_checkpoint(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = _checkpoint(tmp_path, {"a": torch.zeros(100)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelMismatchError, match="cut short"):
        layout_of_checkpoint(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"no model\.safetensors"):
        layout_of_checkpoint(tmp_path)


def test_nothing_is_left_behind_when_the_process_is_killed() -> None:
    # The memory has no name anywhere in the file system, so all that can remain is the process's own descriptor.
    script = (
        "import os, signal; from anabranch.producers.mirror import SharedMemory;"
        "m = SharedMemory('anabranch-mirror', 1 << 20); print(os.readlink(m.path), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    assert done.stdout.strip() == "/memfd:anabranch-mirror (deleted)"
    assert not list(Path("/dev/shm").glob("anabranch-mirror*"))
