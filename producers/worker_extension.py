"""What runs inside every vLLM worker: vLLM imports this module there (`worker_extension_cls`) before it loads a model.

Invariant: importing it registers the weight-transfer backend and, on the CPU, installs the shim, so neither depends
on which process a worker lives in. Held by tests/e2e/test_engine_digest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from anabranch.producers import vllm_cpu_shim
from anabranch.producers.weight_transfer import AnabranchWeightTransferEngine, register
from anabranch.schemas.errors import AnabranchError

Refusal = tuple[str, str]  # class in schemas/errors.py, message

if current_platform.is_cpu():
    vllm_cpu_shim.install()
register()


class AnabranchWorkerExtension:
    """Methods mixed into vLLM's worker, called by name through `collective_rpc`.

    They return what went wrong, None for nothing, and do not raise: with several workers, vLLM's executor raises at the
    first failed answer and leaves the others unread, so that every later call would get answers of an earlier one.
    """

    if TYPE_CHECKING:
        weight_transfer_engine: Any

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def anabranch_init(self, model_dir: str) -> Refusal | None:
        """Resolve the index map and check the live weights against the checkpoint."""
        return _refusal(lambda: self.init_weight_transfer_engine({"model_dir": model_dir}))

    def anabranch_stage(self, update_info: dict[str, Any]) -> Refusal | None:
        """Check an update and work out its writes; nothing is written before every worker has agreed."""
        return _refusal(lambda: self._anabranch_engine().stage(update_info))

    def anabranch_cancel(self) -> None:
        """Forget a staged update that some worker refused."""
        self._anabranch_engine().cancel()

    def anabranch_export_live(self, path: str, layout_hash: str) -> Refusal | None:
        """Write the live weights of this worker into the flat image at `path`."""
        return _refusal(lambda: self._anabranch_engine().export_live(path, layout_hash))

    def _anabranch_engine(self) -> AnabranchWeightTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, AnabranchWeightTransferEngine)
        return engine


def _refusal(act: Callable[[], None]) -> Refusal | None:
    try:
        act()
    except AnabranchError as error:
        return type(error).__name__, str(error)
    return None
