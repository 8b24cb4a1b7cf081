"""Processes that take turns in one measurement: each holds its model, one at a time works.

Invariant: only one of them is asked at a time, and an answer is waited for no longer than `TURN_DEADLINE_S`; what libraries
print is not taken for an answer. Held by tests/unit/learner/test_bench_turns.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from anabranch.schemas.errors import AnabranchError, DeadlineError

TURN_DEADLINE_S = 3600.0


class Link:
    """A way's end of its pipes: what libraries print goes to stderr instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Whether there is another turn."""
        return sys.stdin.readline().strip() == "go"

    def answer(self, **what: Any) -> None:
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()


class Worker:
    """A way in its own process, as the one who gives the turns sees it."""

    def __init__(self, name: str, argv: list[str], log: Path) -> None:
        """Start `argv` under this interpreter; waits for its first answer, `facts`. stderr goes to `log`.

        Raises:
            DeadlineError: no answer in `TURN_DEADLINE_S`.
            AnabranchError: it ended; with the end of its log.
        """
        self.name, self._log = name, log
        with log.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-I", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
            )
        try:
            self.facts = self._read()
        except BaseException:
            self.close()
            raise

    def turn(self) -> dict[str, Any]:
        """Let it work, and what it then answers.

        Raises:
            DeadlineError, AnabranchError: as above.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading says so
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], TURN_DEADLINE_S)
        if not ready:
            raise DeadlineError.waiting_for(f"an answer of {self.name}", TURN_DEADLINE_S, f"see {self._log}")
        if not (line := out.readline()):
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise AnabranchError(f"{self.name} ended without an answer; its last words:\n{tail}")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes, too
