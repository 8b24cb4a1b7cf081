"""Skip deltas and anchors, made while nothing is published: a job at a time, a few milliseconds each.

Invariant: every rank plans the same work from the same orders, in the same order: of a version v its skips from v − 2^k,
shortest first, then its anchor if one was ordered. What cannot be made any more, or is so late that the next skips of its
length are due, is declined: the rank says so instead of leaving rank 0 to wait. A publish never waits for more than the
one job at hand; what is uploaded waits in a thread of its own. Held by tests/unit/learner/test_compactor.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from anabranch.kernels.delta_codec import encode_job
from anabranch.learner.uploads import Uploads
from anabranch.learner.version_history import Job, VersionGoneError, VersionHistory
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Chunk

NO_MEMORY = "channel.skip_memory_bytes is used up"
LATE = 4  # lengths of a skip after which it is not begun any more
IN_FLIGHT = 2  # chunks that wait for the blob store before the next job
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Task:
    """Make this rank's share of `label` at `version`: from `base`, or a snapshot if None."""

    version: int
    step: int
    label: str
    base: int | None

    @property
    def length(self) -> int:
        return 0 if self.base is None else self.version - self.base


@dataclass(frozen=True, slots=True)
class Outcome:
    """`declined` says why there are no chunks."""

    task: Task
    chunks: tuple[Chunk, ...] = ()
    changed_elements: int = 0
    declined: str = ""


@dataclass(slots=True)
class _Running:
    task: Task
    next_job: int = 0
    changed_elements: int = 0
    uploads: list[Future[Chunk]] = field(default_factory=list)


class Compactor:
    """Args:
    fork_version: no skip begins before it.
    done: told of every task, in order.
    """

    def __init__(
        self,
        layout: Layout,
        jobs: Sequence[Job],
        history: VersionHistory,
        uploads: Uploads,
        *,
        fork_version: int,
        levels: int,
        done: Callable[[Outcome], object],
    ) -> None:
        self._layout, self._jobs, self._history, self._uploads = layout, jobs, history, uploads
        self._fork_version, self._levels, self._done = fork_version, levels, done
        self._waiting: deque[Task] = deque()
        self._running: _Running | None = None

    def plan(self, version: int, step: int, *, anchor: bool) -> None:
        """Note what is due of `version`, the newest; the versions that it needs stay until it is done."""
        for task in due(version, step, fork_version=self._fork_version, levels=self._levels, anchor=anchor):
            self._waiting.append(task)
            self._pin(task, 1)

    def work(self) -> float | None:
        """One job; in how many seconds there is more, None if nothing is planned."""
        if self._running is None:
            if not self._waiting:
                return None
            self._running = _Running(self._waiting.popleft())
            if (why := self._hopeless(self._running.task)) is not None:
                self._end(Outcome(self._running.task, declined=why))
                return 0.0
        running = self._running
        try:
            made = self._continue(running)
        except VersionGoneError:
            made = Outcome(running.task, declined=NO_MEMORY)
        except TemporaryError as error:  # the blob store: the steps go on without it, or fail by themselves
            name = f"{running.task.label} of version {running.task.version}"
            structlog.get_logger().warning("left out, the blob store does not take it", what=name, error=str(error))
            made = Outcome(running.task, declined=str(error))
        if isinstance(made, float):
            return made
        self._end(made)
        return 0.0

    def _continue(self, running: _Running) -> float | Outcome:
        """In how many seconds there is more, or the end of it."""
        if sum(not future.done() for future in running.uploads) >= IN_FLIGHT:
            return POLL_S
        task = running.task
        if running.next_job < len(self._jobs):
            base = None if task.base is None else self._history.at(task.base)
            made = encode_job(self._layout, self._jobs[running.next_job], base, self._history.at(task.version))
            running.next_job += 1
            running.changed_elements += sum(made.changed.values())
            running.uploads += [self._uploads.put(chunk) for chunk in made.chunks]
            return 0.0
        if not all(future.done() for future in running.uploads):
            return POLL_S
        return Outcome(task, tuple(future.result() for future in running.uploads), running.changed_elements)

    def _hopeless(self, task: Task) -> str | None:
        kept = self._history.versions()
        if task.version not in kept or (task.base is not None and task.base not in kept):
            return NO_MEMORY
        if task.base is not None and self._history.head - task.version >= LATE * task.length:
            return f"{self._history.head - task.version} versions late"
        return None

    def _end(self, outcome: Outcome) -> None:
        self._running = None
        self._pin(outcome.task, -1)
        self._done(outcome)

    def _pin(self, task: Task, by: int) -> None:
        for version in (task.version, task.base):
            if version is not None:
                self._history.pin(version) if by > 0 else self._history.unpin(version)


def due(version: int, step: int, *, fork_version: int, levels: int, anchor: bool) -> list[Task]:
    """What is to be made of `version` beside its delta."""
    tasks = []
    for k in range(1, levels + 1):
        base = version - 2**k
        if version % 2**k == 0 and base >= fork_version:
            tasks.append(Task(version, step, f"skip{2**k}", base))
    if anchor:
        tasks.append(Task(version, step, "anchor", None))
    return tasks
