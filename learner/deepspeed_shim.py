"""Everything that exists only because DeepSpeed also has to run on the CPU. On CUDA nothing here is applied.

Invariant: each shim names the version it was written for, what it does, and when it can go; `apply` verifies that
the library still is what the shim assumes and fails loudly otherwise. Held by
tests/unit/learner/test_deepspeed_shim.py.

Written for deepspeed 0.19.8.

1. `DS_ACCELERATOR=cpu` before the first import: DeepSpeed otherwise probes for devices. Goes when the accelerator can
   be passed to `deepspeed.initialize`.
2. No shared-memory collectives: `deepspeed_shm_comm` is compiled with the system's C++ compiler at first use (minutes,
   and it needs a compiler). gloo does the work instead. Goes when the wheel ships the op or offers a switch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from anabranch.schemas.errors import ConfigError

WRITTEN_FOR = "0.19.8"
SHM_OP = "deepspeed_shm_comm"


def prepare_environment() -> None:
    """Set what DeepSpeed reads while it is imported. Raises ConfigError if it was imported before without it."""
    if "deepspeed" in sys.modules and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise ConfigError("deepspeed was imported before the CPU accelerator was chosen; import the learner first")
    os.environ["DS_ACCELERATOR"] = "cpu"


def apply(deepspeed: Any) -> None:
    """Patch the imported library. Raises ConfigError if it is not the one these shims were written for."""
    if deepspeed.__version__ != WRITTEN_FOR:
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} is installed; the CPU shims were written for {WRITTEN_FOR}: "
            "install that version, or review learner/deepspeed_shim.py"
        )
    if deepspeed.get_accelerator().device_name() != "cpu":
        raise ConfigError("deepspeed did not take the CPU accelerator although DS_ACCELERATOR=cpu is set")
    ops = deepspeed.ops.__compatible_ops__
    if SHM_OP not in ops:
        raise ConfigError(f"deepspeed no longer lists the op {SHM_OP!r}: review learner/deepspeed_shim.py")
    ops[SHM_OP] = False
