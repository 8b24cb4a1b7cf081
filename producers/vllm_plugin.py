"""What a stock vLLM server loads of this package: the entry point `vllm.general_plugins`.

Invariant: `register` changes nothing for a server that does not ask for the backend "anabranch": it names a class that is
imported only when the backend is created, and on the CPU puts a switch in front of weight packing that looks at the
server's own configuration. It never raises. Held by tests/e2e/test_vllm_serve.py and tests/e2e/test_vllm_cpu_shim.py.

vLLM calls it in every process (API server, engine core, workers), several times if it likes.
"""

from __future__ import annotations

import logging

BACKEND = "anabranch"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "anabranch"}'` known to vLLM in this process. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "anabranch.producers.weight_transfer", "AnabranchWeightTransferEngine"
        )
    if current_platform.is_cpu():
        from anabranch.producers import vllm_cpu_shim
        from anabranch.schemas.errors import AnabranchError

        try:
            vllm_cpu_shim.install()
        except AnabranchError as error:  # the backend itself refuses packed weights, other servers go on
            logging.getLogger("vllm").warning("anabranch: no weight updates on the CPU: %s", error)
