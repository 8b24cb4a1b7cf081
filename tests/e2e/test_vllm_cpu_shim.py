"""The CPU shim says so, loudly, when the library it was written for has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.producers import vllm_cpu_shim
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
