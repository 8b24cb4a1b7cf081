"""Processes that run cells of the lag study, one after the other: the worker itself, and what its owner holds of it.

Invariant: a worker dies with its owner, and an owner hears of a worker's death: no cell is waited for that nobody runs. What
goes between them is a JSON object a line. Held by tests/process/test_bench_lag.py.

DeepSpeed and transformers take seconds to import, so a worker lives for many cells. It writes to the standard output that it was
started with; whatever prints later goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from anabranch.deploy.lag_measures import Measuring
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, TemporaryError
from anabranch.transport.runtime import bound_to_parent

Inbox = queue.Queue[tuple["Worker", dict[str, Any]]]  # what workers say; {} at their end
END_S = 10.0


class Worker:
    """A process that is told what to run. `done`: cells it was given; `idle`: set by its owner when it has a result."""

    def __init__(self, inbox: Inbox) -> None:
        argv = [sys.executable, "-I", "-m", "anabranch.deploy.lag_worker"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            bound_to_parent(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        self.done, self.idle = 0, True
        self._reader = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self._reader.start()

    def run(self, config: RunConfig, lag: int, measuring: Measuring) -> None:
        """Begin a cell; its result arrives in the inbox."""
        job = {"config": config.model_dump_json(), "lag": lag, "measuring": asdict(measuring)}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: its end is in the inbox
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        self.done, self.idle = self.done + 1, False

    def close(self) -> None:
        with suppress(BrokenPipeError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S if self.idle else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def death(self) -> TemporaryError:
        """Why its end came before its result."""
        code = self._process.wait(timeout=END_S)
        self._errors.seek(0)
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-3:]
        return TemporaryError(
            f"a process of the study ended with {code}: {' | '.join(last) or 'it said nothing'}. Finished cells are kept: --resume goes on"
        )

    def _read(self, inbox: Inbox) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, {}))


def main() -> int:
    """Jobs from standard input, until it ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    from anabranch.deploy.lag_cell import run_cell

    for line in sys.stdin:
        job = json.loads(line)
        try:
            config = RunConfig.model_validate_json(job["config"])
            result = run_cell(config, job["lag"], Measuring(**job["measuring"]), tell=lambda text: say(tell=text))
        except AnabranchError as error:
            say(error=str(error), exit_code=error.exit_code)
        else:
            say(result=result.as_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
