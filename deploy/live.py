"""Keeps what a user sees up to date: the live screen on a terminal, else one JSON line per record.

Invariant: of the run it only reads (metrics.jsonl, the hub's board, the supervisor's child states), and a hub that
cannot be reached stops nothing: it is asked again after a pause. A look at the board is three calls, each of which may
use up its patience, so a tick can last some seconds where the hub hangs. Swaps it sees there are sampled into
`swaps.jsonl`, for the summary; what it cannot write (a full disk, a closed pipe) is the caller's OSError.
Held by tests/unit/deploy/test_live.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import structlog
from rich.console import Console
from rich.live import Live

from anabranch.deploy.child import Child
from anabranch.deploy.display import ChildLine, RunView, alarms, render
from anabranch.deploy.history import MetricsTail
from anabranch.deploy.summary import SWAPS_FILE
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.metrics import ProducerStatus, Record, StepRecord
from anabranch.transport.boards import RunBoard
from anabranch.transport.metrics_log import METRICS_FILE

DRAW_EVERY_S = 0.25
BOARD_EVERY_S = 1.0
BOARD_RETRY_S = 3.0
_NUMBERS = re.compile(r"[\d.e+-]+")


class Monitor:
    """Call `tick` often; it does what is due. Use as a context manager, so that the terminal is given back.

    Args:
        connect_board: gives a board or raises an AnabranchError; asked again later when it raised.
        children: the supervisor's children, now.
        out: where the screen or the JSON lines go.

    Records that are in metrics.jsonl already (a resumed run) are known, but not printed again.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        connect_board: Callable[[], RunBoard],
        children: Callable[[], Sequence[Child]],
        out: TextIO,
    ) -> None:
        self._tail = MetricsTail(run_dir / METRICS_FILE)
        self._tail.poll()
        self._swaps_path = run_dir / SWAPS_FILE
        self._connect_board, self._children = connect_board, children
        self._board: RunBoard | None = None
        self._swaps_seen: set[tuple[str, str]] = set()
        self._began, self._began_ms = time.monotonic(), time.time_ns() // 1_000_000
        self.steps_seen = 0  # records of steps that came while we watched
        self._next_draw = self._next_board = 0.0
        self._alarms: set[str] = set()
        self.view = RunView(title=run_dir.name)
        self._console = Console(file=out)
        self.is_terminal = out.isatty() and not self._console.is_dumb_terminal
        self._live: Live | None = None
        if self.is_terminal:
            self.view.ascii_only = not (self._console.encoding or "").lower().startswith("utf")
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        else:
            self._lines = structlog.wrap_logger(
                structlog.PrintLogger(out), processors=[structlog.processors.JSONRenderer()], wrapper_class=None
            )

    def __enter__(self) -> Monitor:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What is going on outside of training; a change is a JSON line where there is no terminal."""
        if text == self.view.phase:
            return
        self.view.phase = text
        if not self.is_terminal and text:
            self._emit("phase", phase=text)

    def stop_asking_the_board(self) -> None:
        """The hub is about to go away."""
        self._next_board = float("inf")

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_board:
            self._next_board = now + BOARD_EVERY_S
            self._ask_board()
        if now >= self._next_draw:
            self._next_draw = now + DRAW_EVERY_S
            self._refresh(now)

    def finish(self) -> None:
        """A last look at everything that was written."""
        self._refresh(time.monotonic())

    def _refresh(self, now: float) -> None:
        records = self._tail.poll()
        view = self.view
        self.steps_seen += sum(isinstance(record, StepRecord) for record in records)
        view.history = self._tail.history
        view.children = [ChildLine(c.spec.name, c.state.value, c.restarts, c.last_exit) for c in self._children()]
        view.elapsed_s = now - self._began
        view.now_ms = time.time_ns() // 1_000_000
        if self._live is not None:
            self._live.update(render(view, width=self._console.width), refresh=True)
            return
        for record in records:
            self._emit_record(record)
        found = alarms(view)
        for alarm in found:
            if _NUMBERS.sub("", alarm) not in self._alarms:
                self._emit("alarm", alarm=alarm)
        self._alarms = {_NUMBERS.sub("", alarm) for alarm in found}

    def _ask_board(self) -> None:
        """The board's state into the view; producers whose process is gone are left out."""
        try:
            if self._board is None:
                self._board = self._connect_board()
            learner, producers = self._board.learner(), self._board.producers()
        except AnabranchError:
            self._next_board = time.monotonic() + BOARD_RETRY_S  # the supervisor restarts what is down
            return
        alive = {child.pid for child in self._children()}
        if learner is not None and learner.updated_ms >= self._began_ms:  # not what one left behind before a resume
            self.view.learner = learner
        self.view.producers = {name: status for name, status in producers.items() if status.pid in alive}
        self._sample_swaps(self.view.producers)

    def _sample_swaps(self, producers: dict[str, ProducerStatus]) -> None:
        fresh = [
            {
                "producer": name,
                "region": status.region,
                "policy": status.policy,
                "swap": status.swaps,
                "pause_ms": status.last_swap_pause_ms,
                "publish_to_serve_ms": status.publish_to_serve_ms,
            }
            for name, status in sorted(producers.items())
            if status.swaps and (name, status.policy) not in self._swaps_seen
        ]
        if fresh:
            self._swaps_seen = {(name, status.policy) for name, status in producers.items()}
            with self._swaps_path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(swap) + "\n" for swap in fresh))

    def _emit_record(self, record: Record) -> None:
        fields = record.model_dump(mode="json", exclude_none=True)
        self._emit(fields.pop("event"), **fields)

    def _emit(self, event: str, **fields: object) -> None:
        self._lines.msg(event, **fields)
