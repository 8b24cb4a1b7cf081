"""Small checkpoints of every dtype, written and read by the safetensors package: what our own reader is held against."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# name -> dtype and shape; an empty and a scalar tensor among them
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "model.embed_tokens.weight": (torch.bfloat16, (50, 16)),
    "model.layers.0.a.weight": (torch.bfloat16, (64, 33)),
    "model.layers.0.b.weight": (torch.float16, (31, 17)),
    "model.layers.1.a.weight": (torch.float32, (129, 5)),
    "model.layers.1.q.weight": (torch.float8_e4m3fn, (40, 11)),
    "model.layers.1.q.scale": (torch.float32, ()),
    "model.layers.2.q.weight": (torch.float8_e5m2, (7, 9)),
    "model.layers.2.double": (torch.float64, (3, 3)),
    "model.buffer.positions": (torch.int64, (12,)),
    "model.buffer.mask": (torch.bool, (5, 5)),
    "model.buffer.small": (torch.int8, (6,)),
    "model.empty": (torch.bfloat16, (0, 8)),
    "model.norm.weight": (torch.bfloat16, (16,)),
}


def random_state(seed: int = 0) -> State:
    """Weights around 0.02 for floats, small numbers for the others."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for name, (dtype, shape) in TENSORS.items():
        if dtype.is_floating_point:
            state[name] = (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        else:
            state[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return state


def step(state: State, *, share: float = 0.05, seed: int = 1) -> State:
    """The state after a step that changes about `share` of the elements, most of them by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    after: State = {}
    for name, tensor in state.items():
        if tensor.dtype is torch.bool:
            flips = torch.rand(tensor.shape, generator=generator) < share
            after[name] = tensor ^ flips
            continue
        bits = tensor.clone().view(_INTEGERS[tensor.element_size()]) if tensor.dim() else tensor.reshape(1).clone()
        bits = bits.view(_INTEGERS[tensor.element_size()])
        moved = torch.rand(bits.shape, generator=generator) < share
        far = torch.rand(bits.shape, generator=generator) < 0.1
        distance = torch.where(far, torch.full_like(bits, 7), torch.ones_like(bits))
        after[name] = torch.where(moved, bits ^ distance, bits).view(tensor.dtype).reshape(tensor.shape)
    return after


def save(path: Path, state: State, *, shards: int = 0, metadata: dict[str, str] | None = None) -> Path:
    """A file when `shards` is 0, else a folder: one file without an index for 1, shards with an index for more."""
    metadata = metadata if metadata is not None else {"note": "kept"}  # of several keys the package shuffles the order
    if shards == 0:
        save_file(state, path, metadata=metadata)
        return path
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "test"}')
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata=metadata)
        return path
    names = sorted(state)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: state[n] for n in names if files[n] == file}, path / file, metadata=metadata)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def load(path: Path) -> State:
    """All tensors of a file, or of every safetensors file of a folder."""
    state: State = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, "pt") as opened:
            state.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a dict
    return state


def raw(state: State) -> dict[str, bytes]:
    """Name -> the bytes of the tensor: NaNs and −0.0 compare as they should."""
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}
