"""What runs inside every vLLM worker: vLLM imports this module there (`worker_extension_cls`) before it loads a model.

Invariant: importing it registers the weight-transfer backend and, on the CPU, installs the shim, so neither depends
on which process a worker lives in. Held by tests/e2e/test_engine_digest.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from anabranch.producers import vllm_cpu_shim
from anabranch.producers.weight_transfer import AnabranchWeightTransferEngine, register

if current_platform.is_cpu():
    vllm_cpu_shim.install()
register()


class AnabranchWorkerExtension:
    """Methods mixed into vLLM's worker, called by name through `collective_rpc`."""

    if TYPE_CHECKING:
        weight_transfer_engine: Any
        model_runner: Any
        _weight_update_active: bool

    def anabranch_cancel_update(self) -> None:
        """Forget an update that some worker refused while it was staged; nothing has been written."""
        self._anabranch_engine().cancel()
        self._weight_update_active = False

    def anabranch_export_live(self, path: str, layout_hash: str) -> None:
        """Write the live weights of this worker into the flat image at `path`."""
        self._anabranch_engine().export_live(path, layout_hash)

    def _anabranch_engine(self) -> AnabranchWeightTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, AnabranchWeightTransferEngine)
        return engine
