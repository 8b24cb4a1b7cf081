"""What exists only because the rollout engine may run on vLLM's CPU backend.

Invariant: after `install()`, the linear and embedding weights of an engine with our weight-transfer backend stay where
the loader put them, in their checkpoint shape, so that an in-place update is what the next forward pass uses; any other
engine packs as before. Held by tests/e2e/test_engine_digest.py and tests/e2e/test_vllm_cpu_shim.py.

Shim 1, unpacked weights. Written for vLLM 0.32.0. On the CPU, `dispatch_cpu_unquantized_gemm` packs each weight
after loading and leaves an empty parameter (or, for tied embeddings, a packed copy that goes stale). It is replaced by
one that keeps `torch.nn.functional.linear` on the live parameter if the engine being loaded is configured for our backend
(vLLM sets its configuration while it loads), and packs otherwise. Remove it when vLLM offers a switch for packing, or
when its packed weights take in-place updates.

Shim 2, whole prefills. Written for vLLM 0.32.0. When a step computes only a part of a seeded request's prompt, the
runner rewinds the request's generator by `set_offset`, which CPU generators lack: the engine dies. `batched_tokens`
makes the step's budget so large that no prompt is ever split. Remove it when the runner guards that call by device.

Mixture-of-experts weights are packed elsewhere, at the same shape; the engine's self-check refuses such a model here.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from anabranch.producers.vllm_plugin import BACKEND
from anabranch.schemas.errors import ConfigError, ModelMismatchError

WRITTEN_FOR = "0.32"
LINEAR = torch.nn.functional.linear  # as it was at first: DeepSpeed's ZeRO-3 replaces the attribute where it runs
_ADVICE = "the CPU shim of producers/vllm_cpu_shim.py must be revised for it"


def install() -> None:
    """Put the switch in front of the packing dispatch. Idempotent.

    Raises:
        ConfigError: this vLLM is not the one the shim was written for, or its internals moved.
    """
    import vllm
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    if not vllm.__version__.startswith(WRITTEN_FOR + "."):
        raise ConfigError(f"vLLM {vllm.__version__} is installed, not {WRITTEN_FOR}.x: {_ADVICE}")
    dispatch: Any = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if getattr(dispatch, "packs", None) is not None:
        return
    if dispatch is None or list(inspect.signature(dispatch).parameters) != ["layer", "remove_weight"]:
        raise ConfigError(f"vLLM {vllm.__version__} packs CPU weights in another way: {_ADVICE}")
    for method in (
        linear.UnquantizedLinearMethod.process_weights_after_loading,
        vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading,
    ):
        # Both import the function by name when called, so replacing the module's attribute is enough.
        if dispatch.__name__ not in method.__code__.co_names:
            raise ConfigError(f"{method.__qualname__} of vLLM {vllm.__version__} packs in another way: {_ADVICE}")
    utils.dispatch_cpu_unquantized_gemm = _switch(dispatch)


def batched_tokens(max_num_seqs: int, max_model_len: int) -> int:
    """Tokens one step may compute, enough for all sequences to be prefilled whole at once."""
    return max_num_seqs * max_model_len


def check_unpacked(model: torch.nn.Module) -> None:
    """Raises ModelMismatchError if a layer of the loaded `model` computes with anything but its live weight."""
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", LINEAR) is not LINEAR:
            raise ModelMismatchError(f"layer {name!r} computes with a packed copy of its weight; {_ADVICE}")


def _switch(packs: Any) -> Any:
    from vllm.config import get_current_vllm_config_or_none

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = config and config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            packs(layer, remove_weight)
        else:  # vLLM calls it with (x, layer.weight, bias)
            setattr(layer, "cpu_linear", LINEAR)  # noqa: B010

    dispatch_cpu_unquantized_gemm.packs = packs  # type: ignore[attr-defined]
    return dispatch_cpu_unquantized_gemm
