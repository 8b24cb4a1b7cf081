"""Which tensors of a checkpoint are a parameter as it is, and which transformers makes out of others when it saves.

Invariant: every tensor of the checkpoint is in exactly one of `plain` and `conversions`; a conversion applied to its
`sources` alone gives its `targets`. Found on meta tensors: no weight is touched. Held by
tests/unit/learner/test_shares.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LAYER = re.compile(r".*\.\d+\.")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Parameters (fused experts, for example) and the checkpoint's tensors that are made of them."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """`plain`: checkpoint name -> parameter with the same elements in the same order."""

    plain: Mapping[str, str]
    conversions: tuple[Conversion, ...]
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def revert(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of the live model under the names and in the shapes of its checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(lm, dict(tensors)))


def checkpoint_names(lm: Any, live: Mapping[str, Tensor]) -> CheckpointNames:
    """How the parameters `live` of `lm` become the tensors of its checkpoint."""
    meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in live.items()}
    split = revert(lm, meta)
    own = {id(tensor): name for name, tensor in meta.items()}
    plain: dict[str, str] = {}
    for name, tensor in split.items():
        source = own.get(id(tensor)) or own.get(id(tensor._base))
        if source is not None and tensor.numel() == meta[source].numel() and tensor.is_contiguous():
            plain[name] = source
    targets = {name: tuple(t.shape) for name, t in split.items() if name not in plain}
    sources = meta.keys() - plain.values()
    return CheckpointNames(
        plain,
        tuple(_conversions(lm, {n: meta[n] for n in meta if n in sources}, targets)),
        {name: (t.dtype, tuple(t.shape)) for name, t in split.items()},
    )


def _conversions(
    lm: Any, sources: Mapping[str, Tensor], targets: Mapping[str, tuple[int, ...]]
) -> Iterable[Conversion]:
    """The smallest groups of `sources` that convert by themselves: alone, by layer, or all that are left."""
    left = dict(sources)
    for group_of in (lambda name: name, lambda name: found[0] if (found := _LAYER.match(name)) else name):
        groups: dict[str, list[str]] = {}
        for name in left:
            groups.setdefault(group_of(name), []).append(name)
        for names in groups.values():
            made = _try(lm, {n: left[n] for n in names})
            if made and all(targets.get(name) == shape for name, shape in made.items()):
                yield Conversion(tuple(names), tuple(made))
                targets = {n: s for n, s in targets.items() if n not in made}
                for name in names:
                    del left[name]
    if left or targets:
        yield Conversion(tuple(left), tuple(targets))


def _try(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that come out of `tensors` alone; None if they do not convert without others."""
    try:
        return {name: tuple(t.shape) for name, t in revert(lm, tensors).items()}
    except Exception:  # noqa: BLE001 - whatever a conversion raises that misses its other half
        return None
