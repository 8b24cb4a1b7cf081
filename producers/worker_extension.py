"""What runs inside every vLLM worker: methods that are called by name through `collective_rpc`.

Invariant: importing this module registers the weight-transfer backend and, on the CPU, installs the shim, so neither
depends on which process a worker lives in (vLLM imports it before it loads a model when it is named as
`worker_extension_cls`); in a stock server, which is not told of it, the backend attaches the methods when it is created.
No method raises what an update can be refused for. Held by tests/e2e/test_engine_digest.py, test_engine_tensor_parallel.py and
test_vllm_serve.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from anabranch.producers import vllm_cpu_shim, vllm_plugin
from anabranch.producers.update_message import STAGING
from anabranch.schemas.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.producers.weight_transfer import AnabranchWeightTransferEngine

Refusal = list[str]  # class in schemas/errors.py, message

if current_platform.is_cpu():
    vllm_cpu_shim.install()
vllm_plugin.register()


class AnabranchWorkerExtension:
    """Methods mixed into vLLM's worker.

    They return what went wrong, None for nothing, and do not raise: with several workers, vLLM's executor raises at the
    first failed answer and leaves the others unread, so that every later call would get answers of an earlier one.
    """

    if TYPE_CHECKING:
        weight_transfer_engine: Any
        vllm_config: Any

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
        def finish_weight_update(self) -> None: ...

    def anabranch_init(self, model_dir: str) -> Refusal | None:
        """Resolve the index map and check the live weights against the checkpoint."""
        return _refusal(lambda: self.init_weight_transfer_engine({"model_dir": model_dir}))

    def anabranch_attach(self, model_dir: str) -> Refusal | None:
        """`anabranch_init`, unless it was done for this checkpoint; whatever an earlier client left unfinished is dropped."""
        engine = self._anabranch_engine()
        engine.cancel()
        with contextlib.suppress(RuntimeError):  # there is no session
            self.finish_weight_update()  # of nothing: only ends it
        return None if engine.model_dir == model_dir else self.anabranch_init(model_dir)

    def anabranch_describe(self) -> dict[str, Any]:
        """Whether it caches prefixes, whose KV no other weights may find, and whether it was attached since it started."""
        return {
            "prefix_caching": bool(self.vllm_config.cache_config.enable_prefix_caching),
            "attached": self._anabranch_engine().model_dir is not None,
        }

    def anabranch_stage(self, update_info: dict[str, Any], background: bool = False) -> Refusal | None:
        """Check an update and work out its writes; nothing is written before every worker has agreed."""
        return _refusal(lambda: self._anabranch_engine().stage(update_info, background=background))

    def anabranch_staged(self, wait: bool = False) -> Refusal | None:
        """None once the update is staged, `STAGING` before, or why it is refused."""
        ready = True

        def ask() -> None:
            nonlocal ready
            ready = self._anabranch_engine().staged(wait=wait)

        refusal = _refusal(ask)
        return STAGING if refusal is None and not ready else refusal

    def anabranch_cancel(self) -> None:
        """Forget a staged update that some worker refused."""
        self._anabranch_engine().cancel()

    def anabranch_export_live(self, path: str, layout_hash: str) -> Refusal | None:
        """Write the live weights of this worker into the flat image at `path`."""
        return _refusal(lambda: self._anabranch_engine().export_live(path, layout_hash))

    def _anabranch_engine(self) -> AnabranchWeightTransferEngine:
        from anabranch.producers.weight_transfer import AnabranchWeightTransferEngine

        engine = self.weight_transfer_engine
        assert isinstance(engine, AnabranchWeightTransferEngine)
        return engine


def attach() -> None:
    """Give the methods to all workers of this process that have not got them by `worker_extension_cls`. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    for name, method in vars(AnabranchWorkerExtension).items():
        if "anabranch" in name and not hasattr(WorkerBase, name):
            setattr(WorkerBase, name, method)


def _refusal(act: Callable[[], None]) -> Refusal | None:
    try:
        act()
    except AnabranchError as error:
        return [type(error).__name__, str(error)]
    return None
