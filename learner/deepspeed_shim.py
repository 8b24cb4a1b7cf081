"""Everything that exists only because DeepSpeed also has to run on the CPU. On CUDA nothing here is applied.

Invariant: each shim names the version it was written for, what it does, and when it can go; `apply` verifies that
the library still is what the shim assumes and fails loudly otherwise. Held by
tests/unit/learner/test_deepspeed_shim.py.

Written for deepspeed 0.19.8.

1. `DS_ACCELERATOR=cpu` before the first import: DeepSpeed otherwise probes for devices. Goes when the accelerator can
   be passed to `deepspeed.initialize`.
2. No compiled ops: DeepSpeed probes which of them it could build (it runs the C compiler for that) and would then
   build its shared-memory collectives at first use, which takes minutes and a compiler. gloo does the work instead.
   Goes when the wheel ships the ops or offers a switch.
"""

from __future__ import annotations

import os
from typing import Any

from anabranch.schemas.errors import ConfigError

WRITTEN_FOR = "0.19.8"
SHM_OP = "deepspeed_shm_comm"


def prepare_environment() -> None:
    """Set what DeepSpeed reads while it is imported; `apply` verifies that it was heeded."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def apply(deepspeed: Any) -> None:
    """Patch the imported library. Raises ConfigError if it is not the one these shims were written for."""
    if deepspeed.__version__ != WRITTEN_FOR:
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} is installed; the CPU shims were written for {WRITTEN_FOR}: "
            "install that version, or review learner/deepspeed_shim.py"
        )
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != "cpu":
        raise ConfigError(
            f"deepspeed runs on {accelerator.device_name()} although learner.device = cpu; it was imported too early"
        )
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if getattr(builder, "NAME", None) != SHM_OP:
        raise ConfigError(f"deepspeed no longer has the op {SHM_OP!r}: review learner/deepspeed_shim.py")
    # Computed by probing on first access, unless it is there already. Nothing but the collectives reads it.
    deepspeed.ops.__compatible_ops__ = {SHM_OP: False}
