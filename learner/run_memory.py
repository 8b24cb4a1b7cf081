"""What the learner remembers of its run between checkpoints: the newest epoch it opened, and that the run is over.

Invariant: what was recorded is read again after any crash; a run that is over at the step of the checkpoint stays so,
and its last evaluation is not asked of producers that may be gone. Held by tests/unit/learner/test_loop.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabranch.schemas.errors import CheckpointError
from anabranch.transport.files import read_json, write_atomically

MEMORY_FILE = "learner.json"


class RunMemory:
    """`directory`/learner.json: {"epoch": int, "finished": {"step": int, "reason": str}}, each where it happened."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if the file is there and is not such a file."""
        self._path = directory / MEMORY_FILE
        self._state: dict[str, Any] = {}
        self.epoch = 0
        self._finished: dict[int, str] = {}
        if not self._path.exists():
            return
        self._state = read_json(self._path, refuse=CheckpointError)
        try:
            self.epoch = int(self._state.get("epoch", 0))
            if finished := self._state.get("finished"):
                self._finished = {int(finished["step"]): str(finished["reason"])}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path} is not what a learner wrote: {error!r}; move it away to go on from the checkpoint alone"
            ) from error

    def finished(self, step: int) -> str | None:
        """Why the run was over after `step` optimizer steps, None if it was not."""
        return self._finished.get(step)

    def opened(self, epoch: int) -> None:
        """`epoch` is open; durable when this returns. Raises OSError."""
        self.epoch = max(self.epoch, epoch)
        self._write({"epoch": self.epoch})

    def finish(self, step: int, reason: str) -> None:
        """The run is over and owes no number any more; durable when this returns. Raises OSError."""
        self._finished = {step: reason}
        self._write({"finished": {"step": step, "reason": reason}})

    def _write(self, change: dict[str, Any]) -> None:
        self._state |= change
        write_atomically(self._path, json.dumps(self._state).encode())
