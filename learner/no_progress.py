"""Why no batch comes together: who is silent, who holds the permits. For the status line and the last message of a wait.

Invariant: it asks the hub at most every `ASK_EVERY_S` and never raises because the hub is away: then it says so.
Held by tests/unit/learner/test_no_progress.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.boards import RunBoard
from anabranch.transport.permits import Permits, PermitState

ASK_EVERY_S = 5.0
_SHOWN = 3


class NoProgress:
    """Call it for the text; silence of a producer is counted from when this one last saw it report, by our own clock."""

    def __init__(self, runs: RunBoard, permits: Permits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._permits, self._clock = runs, permits, clock
        self._began_s = clock()
        self._seen: dict[str, tuple[float, ProducerStatus]] = {}
        self._text, self._asked_s = "", -ASK_EVERY_S

    def __call__(self) -> str:
        now = self._clock()
        if now - self._asked_s >= ASK_EVERY_S:
            self._asked_s = now
            try:
                reporting, permits = self._runs.producers(), self._permits.state()
            except StreamUnavailableError as error:
                self._text = f"the hub does not say why ({error})"
            else:
                self._seen |= {name: (now, status) for name, status in reporting.items()}
                self._text = f"{self._producers(reporting, now)}; {self._leases(permits, reporting, now)}"
        return self._text

    def _producers(self, reporting: Mapping[str, ProducerStatus], now: float) -> str:
        if reporting:
            said = [
                f"{name} {(s.waiting_for and 'waits for ' + s.waiting_for) or s.state}" for name, s in reporting.items()
            ]
            return f"{len(reporting)} producers report: {_some(said)}"
        last = max((at for at, _ in self._seen.values()), default=None)
        if last is None:
            return f"no producer has reported since this learner began to wait, {now - self._began_s:.0f} s ago"
        return f"no producer has reported for {now - last:.0f} s"

    def _leases(self, permits: PermitState, reporting: Mapping[str, ProducerStatus], now: float) -> str:
        if permits.epoch is None:
            return "permits are not open"
        waiting = permits.expired + permits.returned + max(0, permits.limit - permits.next_index)
        if not permits.leased:
            return f"{waiting} permits wait for somebody to take them"
        held = [
            f"{groups} by {name}" + ("" if name in reporting else f", {self._silence(name, now)}")
            for name, groups in sorted(permits.leased.items(), key=lambda row: -row[1])
        ]
        text = f"{sum(permits.leased.values())} permits are leased: {_some(held)}"
        return f"{text}; {waiting} wait to be taken" if waiting else f"all {text}"

    def _silence(self, producer: str, now: float) -> str:
        if producer not in self._seen:
            return "which has not reported"
        at, status = self._seen[producer]
        return f"of region {status.region}, silent for {now - at:.0f} s"


def _some(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
