"""How the suite is shared out between two worker processes (pytest-xdist); tests/conftest.py hands it to pytest.

Invariant: a file runs in one worker from beginning to end, files that share an engine in the same one; of the files in
`WHOLE_MACHINE`, each of which starts pipelines with engines of their own, one runs at a time, while the other worker does
what needs less; and what takes long begins early. Held by tests/test_scheduling.py.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

WORKERS = 2
# One at a time, in this order.
WHOLE_MACHINE = (
    "tests/process/test_chaos.py",
    "tests/e2e/test_survival.py",
    "tests/e2e/test_synchronous.py",
    "tests/e2e/test_two_ranks.py",
    "tests/e2e/test_engine_tensor_parallel.py",
    "tests/e2e/test_deadlines.py",
)
# The longest of the others: half a minute and more.
LONG = (
    "tests/e2e/test_learner_engine.py",
    "tests/unit/kernels/test_triton.py",
    "tests/process/test_demo.py",
    "tests/process/test_delta_memory.py",
    "tests/process/test_delta_in_place.py",
    "tests/process/test_weights_commands.py",
    "tests/unit/deploy/test_delta_verify.py",
    "tests/process/test_swap_kills.py",
    "tests/e2e/test_vllm_serve.py",
    "tests/process/test_delta_commands.py",
    "tests/unit/learner/test_smollm2.py",
    "tests/e2e/test_region_bytes.py",
    "tests/e2e/test_bench_swap.py",
    "tests/e2e/test_vllm_cpu_shim.py",
)
# Files whose engines are made once per session.
TOGETHER = {
    "tests/e2e/test_engine_tags.py": "tests/e2e/test_engine_digest.py",
}
_RANK = {name: rank for rank, name in enumerate((*WHOLE_MACHINE, *LONG))}


def worker_count(args: Sequence[str], keyword: str) -> int | None:
    """Of `-n auto`: none (this process runs the tests) where files, tests or a keyword were named, or inside of a worker;
    None where the environment says how many."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return 0
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    return 0 if keyword or any(".py" in arg for arg in args) else WORKERS


def isolated_python() -> str:
    """The command of a worker's Python: as isolated as this one."""
    return shlex.join([sys.executable, "-I"] if sys.flags.isolated else [sys.executable])


def unit_of(nodeid: str) -> str:
    """The file whose worker runs a test."""
    file = nodeid.split("::", 1)[0]
    return TOGETHER.get(file, file)


def next_unit(waiting: Mapping[str, Any], elsewhere: set[str]) -> str:
    """Which of `waiting` to begin, in which order they were shuffled, while the other workers are at those of `elsewhere`."""
    busy = not elsewhere.isdisjoint(WHOLE_MACHINE)
    return min(waiting, key=lambda unit: (busy and unit in WHOLE_MACHINE, _RANK.get(unit, len(_RANK))))


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        elsewhere = {
            unit
            for other, units in self.assigned_work.items()
            if other is not node
            for unit, tests in units.items()
            if not all(tests.values())
        }
        self.workqueue.move_to_end(next_unit(self.workqueue, elsewhere), last=False)
        super()._assign_work_unit(node)
