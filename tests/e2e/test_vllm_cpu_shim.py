"""The CPU shim says so, loudly, when the library it was written for has changed."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch.producers import vllm_cpu_shim, vllm_plugin
from anabranch.producers.mirror import Mirror
from anabranch.schemas.errors import ConfigError, ModelMismatchError
from tests.e2e.lab import Lab
from tests.tiny import build_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180), pytest.mark.usefixtures("recompute_lab")]
DISPATCH = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"  # imported by the lab's engine, not before


def test_another_vllm_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.1 is installed, not 0\.32\.x"):
        vllm_cpu_shim.install()


def test_a_dispatch_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DISPATCH, lambda layer: None)
    with pytest.raises(ConfigError, match="must be revised"):
        vllm_cpu_shim.install()
    monkeypatch.delattr(DISPATCH)
    with pytest.raises(ConfigError, match="must be revised"):
        vllm_cpu_shim.install()


def test_a_layer_that_packs_by_other_means_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatch_cpu_unquantized_gemm(layer: object, remove_weight: bool) -> None: ...

    monkeypatch.setattr(DISPATCH, dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod.process_weights_after_loading",
        lambda self, layer: None,
    )
    with pytest.raises(ConfigError, match="must be revised"):
        vllm_cpu_shim.install()


def test_installing_twice_changes_nothing() -> None:
    from vllm.model_executor.layers import utils

    before = utils.dispatch_cpu_unquantized_gemm
    vllm_cpu_shim.install()
    assert utils.dispatch_cpu_unquantized_gemm is before


@pytest.mark.parametrize(
    ("backend", "kept"), [("anabranch", True), ("nccl", False), ("no transfer", False), ("no configuration", False)]
)
def test_only_engines_of_our_backend_keep_their_weights(
    backend: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = None if backend == "no transfer" else SimpleNamespace(backend=backend)
    config = None if backend == "no configuration" else SimpleNamespace(weight_transfer_config=transfer)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    packed: list[object] = []
    switch = vllm_cpu_shim._switch(lambda layer, remove_weight: packed.append(layer))
    layer = torch.nn.Linear(2, 2)
    switch(layer, True)
    assert packed == ([] if kept else [layer])
    assert (getattr(layer, "cpu_linear", None) is vllm_cpu_shim.LINEAR) is kept


def test_the_plugin_can_be_registered_again_and_never_breaks_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    vllm_plugin.register()
    made = WeightTransferEngineFactory._registry["anabranch"]()
    assert made.__name__ == "AnabranchWeightTransferEngine"
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        vllm_plugin.register()
    assert "no weight updates on the CPU: vLLM 0.33.1 is installed" in caplog.text


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "anabranch"]
    assert found.load() is vllm_plugin.register


def test_loading_the_plugin_loads_nothing() -> None:
    program = (
        "import sys\nfrom anabranch.producers.vllm_plugin import register\n"
        "print([m for m in ('torch', 'vllm', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_layer_that_computes_with_a_packed_copy_is_found(recompute_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = recompute_lab.engine._engine.model_executor.driver_worker.model_runner.get_model()
    vllm_cpu_shim.check_unpacked(model)
    layer = model.model.layers[0].mlp.down_proj
    monkeypatch.setattr(layer, "cpu_linear", lambda x, weight, bias: x)
    with pytest.raises(ModelMismatchError, match=r"layers\.0\.mlp\.down_proj"):
        vllm_cpu_shim.check_unpacked(model)


_START = """
import sys
from pathlib import Path
from anabranch.producers.engine import RolloutEngine
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError
if sys.argv[2] == "packed":
    from anabranch.producers import vllm_cpu_shim
    vllm_cpu_shim.install = lambda: None
    vllm_cpu_shim.check_unpacked = lambda model: None
try:
    RolloutEngine(Path(sys.argv[1]), ProducerSection(), SamplingSection(), seed=0)
except AnabranchError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("packed", "is empty: the backend packed its weights away"),
        ("stray tensor", "layers.0.mlp.stray"),
    ],
)
def test_an_engine_that_could_not_be_updated_does_not_start(tmp_path: Path, case: str, said: str) -> None:
    model_dir = build_checkpoint(tmp_path / "model")
    if case == "stray tensor":
        _add_tensor(model_dir, "model.layers.0.mlp.stray.weight")
    command = [sys.executable, "-I", "-c", _START, str(model_dir), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout.startswith("ModelMismatchError"), done.stderr[-2000:]
    assert said in done.stdout


def _add_tensor(model_dir: Path, name: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = model_dir / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(4, 4, dtype=torch.bfloat16)}, file, metadata={"format": "pt"})
    assert name in Mirror.from_checkpoint(model_dir).layout.by_name
