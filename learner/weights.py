"""The learner's weights under the names and in the dtype in which a Hugging Face checkpoint stores them.

Invariant: `PublishedWeights.tensors` is what `save_pretrained` would write at this moment: tied weights once, layers
that transformers fuses split again; float32 masters rounded to the stored dtype. Held by
tests/unit/learner/test_weights.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.learner.conversions import checkpoint_names, revert
from anabranch.learner.live_share import SIGNED, TORCH, LiveShare
from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.layout import Layout

# torch dtype -> (layout dtype, the unsigned integer of the same width in torch and NumPy)
_BITS: dict[torch.dtype, tuple[str, torch.dtype, type[np.unsignedinteger[Any]]]] = {
    torch.bfloat16: ("bf16", torch.int16, np.uint16),
    torch.float16: ("f16", torch.int16, np.uint16),
    torch.float32: ("f32", torch.int32, np.uint32),
}


class PublishedWeights:
    """Reads the weights of `lm` (a transformers model). Built before DeepSpeed touches the model; keeps the parameter
    objects, whose content DeepSpeed moves and partitions but whose identity stays."""

    def __init__(self, lm: Any) -> None:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        kept = remove_tied_weights_from_state_dict(lm.state_dict(), lm)
        live = lm.state_dict(keep_vars=True)
        self._lm = lm
        self._live: dict[str, Tensor] = {name: live[name] for name in kept}
        self._stored = {name: tensor.dtype for name, tensor in kept.items()}  # masters become float32 later
        self._names = checkpoint_names(lm, kept)
        self.layout = Layout.build(
            (name, _layout_dtype(name, dtype), shape) for name, (dtype, shape) in self._names.shapes.items()
        )

    def share(self, rank: int = 0, world_size: int = 1) -> LiveShare:
        """What `rank` publishes. Call it after DeepSpeed has partitioned the parameters."""
        return LiveShare(self._lm, self.layout, self._names, self._live, rank=rank, world_size=world_size)

    @torch.no_grad()
    def tensors(self, *, on_this_rank: bool = True) -> dict[str, Tensor]:
        """Name -> tensor of the stored dtype on the CPU, not aliasing the live weights. Collective under ZeRO-3;
        ranks with `on_this_rank` false take part and get {}. For export: publishing gathers nothing (`share`)."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in self._live.items():
            if hasattr(tensor, "ds_id"):
                import deepspeed

                # One at a time: no rank ever holds more than one whole tensor beyond its own part.
                with deepspeed.zero.GatheredParameters([tensor]):
                    if on_this_rank:
                        gathered[name] = self._copy(name, tensor)
            elif on_this_rank:
                gathered[name] = self._copy(name, tensor)
        if not on_this_rank:
            return {}
        return {name: tensor.contiguous() for name, tensor in revert(self._lm, gathered).items()}

    def bits(self, *, on_this_rank: bool = True) -> dict[str, NDArray[Any]]:
        """`tensors` as flat unsigned integers."""
        return {name: tensor_bits(t) for name, t in self.tensors(on_this_rank=on_this_rank).items()}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True).to(self._stored[name])


def tensor_bits(tensor: Tensor) -> NDArray[Any]:
    """Flat view of `tensor` (CPU, contiguous) as unsigned integers of the same width."""
    _, signed, unsigned = _BITS[tensor.dtype]
    return tensor.view(signed).numpy().reshape(-1).view(unsigned)


def export_hf(directory: Path, layout: Layout, bits: dict[str, NDArray[Any]], *, source: Path) -> None:
    """Write a Hugging Face folder: configuration and tokenizer from `source`, weights from `bits` (as `PublishedWeights.
    bits` gives them), one safetensors file. Raises OSError, and TemporaryError: the disk does not take the weights."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = {
        spec.name: torch.from_numpy(bits[spec.name].view(SIGNED[spec.dtype]))
        .view(TORCH[spec.dtype])
        .reshape(spec.shape)
        for spec in layout.tensors
    }
    config = json.loads((directory / "config.json").read_text())
    config.pop("torch_dtype", None)
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
    config["dtype"] = dtypes.pop() if len(dtypes) == 1 else config.get("dtype", "float32")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    target = directory / "model.safetensors"
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of an OSError
        raise TemporaryError(f"{target} cannot be written ({error}): make room and start again") from error


def _layout_dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in _BITS:
        raise ConfigError(f"weight {name!r} has dtype {dtype}, which the learner cannot publish")
    return _BITS[dtype][0]
