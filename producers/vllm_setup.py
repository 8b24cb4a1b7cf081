"""Setting vLLM up: the environment it reads when it is imported, and the engine's arguments.

Invariant: after `configure_environment`, vLLM runs in this process (or in workers it starts itself), reports to nobody,
loads no foreign plugin, fetches nothing and listens on loopback at most. Held by tests/e2e/test_vllm_setup.py
and test_engine_tags.py.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anabranch.producers.checkpoint import read_object
from anabranch.schemas.config import ProducerSection
from anabranch.schemas.errors import ConfigError, ModelMismatchError

PRELOAD_VARIABLE = "LD_PRELOAD"
CACHE_VARIABLE = "ANABRANCH_CACHE_DIR"
EXTENSION = "anabranch.producers.worker_extension.AnabranchWorkerExtension"

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the producer itself calls step()
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",  # an allow list that names none
    "HF_HUB_OFFLINE": "1",  # models are folders here
    "TRANSFORMERS_OFFLINE": "1",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is the program's own
    "TOKENIZERS_PARALLELISM": "false",
    # A tensor-parallel group lives on one node: its rendezvous stays there. An operator may say otherwise.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else the sampler compiles anew at every batch shape (seconds each)
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a producer shares its cores
}


def configure_environment(config: ProducerSection) -> None:
    """Set what vLLM needs; call it before anything imports vllm. Idempotent.

    Raises:
        ConfigError: vLLM is not installed, or was imported before with another setting.
    """
    if find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed: install the extra 'cpu' or 'gpu'")
    wanted = _ALWAYS | (_CPU if config.device == "cpu" else {})
    if "vllm" in sys.modules:
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                raise ConfigError(f"vLLM was imported before its environment was set ({name} must be {value!r})")
    os.environ.update(wanted)
    if config.device == "cpu":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are advice on speed that does not apply
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if cache_dir := os.environ.get(CACHE_VARIABLE):
        os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(cache_dir, "vllm"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(cache_dir, "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(cache_dir, "triton"))
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and config.device == "cpu":
        dynamo.disable = True  # type: ignore[attr-defined]  # it read the variable when it was imported


def build_engine(model_dir: Path, config: ProducerSection, seed: int) -> Any:
    """A synchronous vLLM engine over `model_dir`; call `configure_environment` first.

    Raises:
        ConfigError: another device than configured, or a setting that vLLM refuses.
        ModelMismatchError: the checkpoint holds a tensor that the model does not know.
    """
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from anabranch.producers import vllm_cpu_shim, vllm_plugin

    if current_platform.device_type != config.device:
        raise ConfigError(f"producer.device = {config.device}, but this vLLM runs on {current_platform.device_type!r}")
    arguments = EngineArgs(
        model=str(model_dir),
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        max_num_batched_tokens=(
            vllm_cpu_shim.batched_tokens(config.max_num_seqs, config.max_model_len) if config.device == "cpu" else None
        ),
        enforce_eager=config.device == "cpu",
        async_scheduling=False,  # a step in flight would make a tag one step off
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the model's own sampling defaults are not used
        seed=seed,
        load_format="safetensors",
        weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.BACKEND),
        worker_extension_cls=EXTENSION,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    preload = os.environ.get(PRELOAD_VARIABLE)
    try:
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, KeyError) as error:  # of its configuration checks and weight loader
        kind = ModelMismatchError if "no module or parameter named" in str(error) else ConfigError
        raise kind(f"vLLM cannot serve {model_dir}: {error}") from error
    finally:
        # vLLM sets it for its own workers, which run by now; every later child of this process would inherit it, and the
        # loader splits it at spaces: an environment in a folder with a space in its name breaks it.
        if preload is None:
            os.environ.pop(PRELOAD_VARIABLE, None)
        else:
            os.environ[PRELOAD_VARIABLE] = preload


def stop_token_ids(model_dir: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json: the tokenizer knows only one of them."""
    ids = read_object(model_dir / "generation_config.json").get("eos_token_id")
    return [] if ids is None else sorted({int(i) for i in (ids if isinstance(ids, list) else [ids])})
