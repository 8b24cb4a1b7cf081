"""`anabranch bench lag`: what each correction keeps of the reward when rollouts are a fixed number of versions old.

Invariant: every cell's result is in the results file, durable, before the next is begun by that process; a study that was
interrupted, however, goes on with the cells that are missing. Held by tests/unit/deploy/test_bench_lag.py.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from anabranch.deploy.lag_study import Cell, Results, Study
from anabranch.deploy.lag_worker import Inbox, Worker
from anabranch.schemas.errors import EXIT_CONFIG, AnabranchError, ConfigError, DeadlineError, UsageError

NO_PROGRESS_S = 1800.0  # without a word from any process; a machine with other work can be slow
CELLS_OF_A_WORKER = 24  # then it is replaced: what libraries leave behind does not add up
Tell = Callable[[str], None]


def run_study(study: Study, results: Results, *, jobs: int, tell: Tell = lambda _: None) -> None:
    """Run the cells that `results` does not have, in `jobs` processes.

    Raises:
        UsageError: `jobs` below 1. ConfigError: a cell's configuration cannot work, or `results` is of other settings.
        TemporaryError: a process died. DeadlineError: none has said anything for `NO_PROGRESS_S`.
    """
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least 1")
    waiting = results.missing(study)
    progress = _Progress(tell, len(study.cells), len(study.cells) - len(waiting))
    inbox: Inbox = queue.Queue()
    with ExitStack() as stack:
        running: dict[Worker, Cell] = {}

        def begin(worker: Worker | None) -> None:
            if not waiting:
                return
            if worker is None or worker.done >= CELLS_OF_A_WORKER:
                worker = Worker(inbox)
                stack.callback(worker.close)
            running[worker] = waiting.pop(0)
            worker.run(study.configs[running[worker]], running[worker].lag, study.measuring)

        for _ in range(min(jobs, len(waiting))):
            begin(None)
        while running:
            worker, message = _next(inbox, running)
            if worker not in running:
                continue  # the end of one that was replaced
            cell = running[worker]
            if "tell" in message:
                progress.during(cell, message["tell"])
            elif "result" in message:
                results.add(cell, study.settings(cell), message["result"])
                progress.after(cell, message["result"])
                del running[worker]
                worker.idle = True
                if worker.done >= CELLS_OF_A_WORKER:
                    worker.close()
                begin(worker)
            elif "error" in message:
                error = ConfigError if message["exit_code"] == EXIT_CONFIG else AnabranchError
                raise error(f"{cell}: {message['error']}")
            else:
                raise worker.death()


def _next(inbox: Inbox, running: dict[Worker, Cell]) -> tuple[Worker, dict[str, Any]]:
    try:
        return inbox.get(timeout=NO_PROGRESS_S)
    except queue.Empty:
        what = ", ".join(map(str, running.values()))
        raise DeadlineError.waiting_for(f"a word of the processes that run {what}", NO_PROGRESS_S) from None


class _Progress:
    """A line for every cell, with the time that the rest will take; what happens within a cell as it happens."""

    def __init__(self, tell: Tell, total: int, done: int) -> None:
        self._tell, self._total, self._before, self._done = tell, total, done, done
        self._began = time.monotonic()

    def during(self, cell: Cell, text: str) -> None:
        self._tell(f"{self._done} of {self._total} done; {cell}: {text}")

    def after(self, cell: Cell, result: dict[str, Any]) -> None:
        self._done += 1
        each = (time.monotonic() - self._began) / (self._done - self._before)
        left_min = math.ceil(each * (self._total - self._done) / 60)
        end = result["stopped"] or f"held-out reward {result['heldout'][-1][1]:.3f}"
        self._tell(f"{self._done} of {self._total}, {left_min} min left; {cell}: {end}, {result['seconds']:.0f} s\n")
