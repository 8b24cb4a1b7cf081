"""Two scenarios of one long outage each: a region that is cut off, and servers without memory.

Invariant: figures are of this run, from records and streams; what an outage held back is followed group by group to its end.
Held by tests/process/test_chaos.py and tests/unit/deploy/chaos/test_outages.py.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

import redis

from anabranch.deploy.chaos.evidence import FateLine, Identity, flat, read_books, read_fate_lines, read_spools
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.log_waits import append_waits
from anabranch.deploy.chaos.place_faults import NO_MEMORY, set_memory
from anabranch.deploy.chaos.verdict import Check
from anabranch.deploy.chaos.waits import Wait
from anabranch.schemas.errors import WireError
from anabranch.schemas.trajectory import decode_group

BEFORE_S = 30.0  # steps per minute are counted over so long before and after the outage
DRAIN_DEADLINE_S = 180.0
SAY_EVERY_S = 5.0
RESUME_TARGET_S = 5.0
SEEN_LATE_S = 10.0  # how much later than it stops a Redis is missed: the socket's time-out, and two busy cores
SPARE_S = 120.0  # a producer waits so much longer for its region than the cut is meant to last
_AWAY = (redis.RedisError, OSError)


class Outage(ABC):
    """Before, during, after: what both scenarios share."""

    name = "outage"
    overrides: Sequence[str] = ()

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline_s = seconds + 2 * BEFORE_S + DRAIN_DEADLINE_S + 120.0
        self.began_s = self.out_s = self.back_s = self.quiet_s = self.over_s = 0.0  # monotonic
        self._said = 0.0

    def begin(self, lab: Lab) -> None:
        self.began_s = time.monotonic()

    def turn(self, lab: Lab) -> bool:
        now = time.monotonic()
        if not self.out_s:
            if now > self.began_s + BEFORE_S:
                self.out_s = now
                self.start(lab)
        elif not self.back_s:
            self.during(lab)
            if now > self.out_s + self.seconds and self.end(lab):
                self.back_s = now
        elif not self.quiet_s:
            if self.settled(lab) or now > self.back_s + DRAIN_DEADLINE_S:
                self.quiet_s = now
        elif now > self.quiet_s + BEFORE_S:
            self.over_s = now
            return True
        return False

    @abstractmethod
    def start(self, lab: Lab) -> None: ...
    def during(self, lab: Lab) -> None:  # noqa: B027 - not every outage has to do something in it
        """Called again and again while it lasts."""

    @abstractmethod
    def end(self, lab: Lab) -> bool:
        """Put everything back; False: could not yet."""

    @abstractmethod
    def settled(self, lab: Lab) -> bool:
        """Whether what waited has ended."""

    def abandon(self, lab: Lab) -> None:
        if self.out_s and not self.back_s and self.end(lab):
            self.back_s = time.monotonic()

    def per_minute(self, steps: Sequence[float], begin: float, end: float) -> float:
        return 60 * sum(begin < when <= end for when in steps) / max(end - begin, 1e-9)

    def rates(self, lab: Lab) -> list[tuple[str, str]]:
        steps = lab.monitor.watch.steps
        windows = [("before", self.began_s, self.out_s), ("during", self.out_s, self.back_s)]
        windows += [("until drained", self.back_s, self.quiet_s), ("after", self.quiet_s, self.over_s)]
        return [(name, f"{self.per_minute(steps, a, b):.0f}") for name, a, b in windows if b > a]

    def waits(self, lab: Lab) -> list[Wait]:
        return []

    def say(self, lab: Lab | None, phase: str, out: TextIO) -> None:
        now = time.monotonic()
        if not phase and now < self._said + SAY_EVERY_S:
            return
        self._said = now
        if not phase:
            marks = [("before", self.began_s), ("out", self.out_s), ("back", self.back_s), ("drained", self.quiet_s)]
            phase = next((name for name, when in reversed(marks) if when), "starting")
        step = lab.monitor.last_step if lab is not None else 0
        samples = lab.monitor.watch.samples if lab is not None else []
        pending = samples[-1].pending if samples else {}
        shown = " ".join(f"{region} {'?' if n is None else n}" for region, n in pending.items())
        print(f"chaos: {self.name}: {phase}, step {step}, pending {shown}", file=out, flush=True)

    def facts(self) -> dict[str, Any]:
        marks = [(self.out_s, "out"), (self.back_s, "back")]
        faults = [
            {"kind": what, "target": "all", "what": what, "phase": "healed", "injected_s": when, "lifted_s": when, "heal_s": 0.0}
            for when, what in marks if when
        ]  # fmt: skip
        return {"marks": faults, "tables": self.tables}

    tables: dict[str, list[tuple[str, ...]]]


class CutOff(Outage):
    """The first region's link is cut. `SPOOLING_S` before that its Redis stops, and comes back with the link: what the producer
    finishes meanwhile stays in its spool, as where all of a site is away."""

    name = "cut"
    SPOOLING_S = 4.0

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.overrides = (f"spool.full_deadline_s={seconds + SPARE_S}",)
        self.waited: dict[str, set[Identity]] = {}  # where -> what had no end when the region came back
        self.region = ""  # until it is cut
        self._cut = False
        self.tables = {}

    @property
    def backlog(self) -> set[Identity]:
        return set().union(*self.waited.values())

    def start(self, lab: Lab) -> None:
        self.region = lab.regions[0]
        self._server(lab, signal.SIGSTOP)

    def during(self, lab: Lab) -> None:
        if not self._cut and time.monotonic() > self.out_s + self.SPOOLING_S:
            self._cut = True
            lab.links[self.region].cut()

    def end(self, lab: Lab) -> bool:
        self._server(lab, signal.SIGCONT)
        try:
            books = read_books(lab.servers[self.region], lab.keys, self.region)
        except _AWAY:
            return False
        spooled = read_spools(lab.place.spool(self.region), self.region)[0]
        self.waited = {
            "in the spool alone": {i for i in spooled if i.seq > books.known.get(i.producer, 0)},
            "in the stream, unread": books.unread,
            "read before, not acknowledged": set(books.open) - books.unread,
        }
        lab.links[self.region].mend()
        return True

    def settled(self, lab: Lab) -> bool:
        """Everything that waited has been appended, read and acknowledged."""
        try:
            books = read_books(lab.servers[self.region], lab.keys, self.region)
        except _AWAY:
            return False
        return all(i.seq <= books.known.get(i.producer, 0) and i not in books.open for i in self.backlog)

    def _server(self, lab: Lab, number: signal.Signals) -> None:
        child = lab.children[f"redis-{self.region}"]
        if child.pid is not None:
            os.kill(child.pid, number)

    def waits(self, lab: Lab) -> list[Wait]:
        """The region's producer cannot tell the hub."""
        return append_waits(lab.place.directory / "logs" / f"producer-{self.region}.log", self.region)

    def checks(self, lab: Lab) -> list[Check]:
        lines, _ = read_fate_lines(lab.place.run_directory / "fates")
        waited_s = max((wait.seconds for wait in self.waits(lab)), default=0.0)
        during = [when for when in lab.monitor.watch.steps if self.out_s < when <= self.back_s]
        drained = f"{self.quiet_s - self.back_s:.1f} s" if self.quiet_s else "not"
        rows: list[tuple[str, ...]] = [
            ("what", "found"),
            ("steps per minute", ", ".join(f"{name}: {rate}" for name, rate in self.rates(lab))),
            ("all that had waited appended, read and settled after", drained),
        ]
        unended = 0
        for where, identities in self.waited.items():
            ends = ends_of(lines, identities)
            unended += len(identities) - sum(ends.values())
            shown = ", ".join(f"{n} {fate}" for fate, n in sorted(ends.items())) or "none"
            rows.append((f"groups {where} at the end of the cut", f"{len(identities)}: {shown}"))
        self.tables = {f"{self.region} cut off for {self.seconds:.0f} s": rows}
        total = len(self.backlog)
        return [
            Check("the learner went on with the others", len(during) >= self.seconds / 10, f"{len(during)} steps"),
            Check(
                "its producer waited for the region all the while",
                waited_s > self.seconds - SEEN_LATE_S,
                f"{waited_s:.0f} s",
            ),
            Check("what waited in the region has ended", not unended, f"{total} waited, {unended} have no end"),
        ]


def ends_of(lines: Sequence[FateLine], identities: set[Identity]) -> Counter[str]:
    """Fates of these deliveries."""
    return Counter(line.fate for line in lines if line.identity in identities)


class OutOfMemory(Outage):
    """Every server at its limit. Producers must stay, and sample again within seconds once there is space."""

    name = "oom"

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._limited: set[str] = set()
        self._pids: dict[str, int | None] = {}
        self.first_token_s: dict[str, float] = {}  # region -> from space to the first rollout begun
        self._back_ms = 0
        self.restarted: list[str] = []
        self.tables = {}

    def start(self, lab: Lab) -> None:
        self._pids = {f"producer-{r}": lab.children[f"producer-{r}"].pid for r in lab.regions}
        self.during(lab)

    def during(self, lab: Lab) -> None:
        for site in lab.servers.keys() - self._limited:
            if set_memory(lab, site, NO_MEMORY):
                self._limited.add(site)

    def end(self, lab: Lab) -> bool:
        self.restarted = [name for name, pid in self._pids.items() if lab.children[name].pid != pid]
        self._back_ms = time.time_ns() // 1_000_000
        self._limited = {site for site in self._limited if not set_memory(lab, site, 0)}
        return not self._limited

    def settled(self, lab: Lab) -> bool:
        """Every producer has sampled a rollout that began after there was space again."""
        for region in lab.regions:
            if region not in self.first_token_s and (begun := self._first_begun(lab, region)) is not None:
                self.first_token_s[region] = begun
        return len(self.first_token_s) == len(lab.regions)

    def _first_begun(self, lab: Lab, region: str) -> float | None:
        """Seconds from space to the begin of the first rollout of any later entry. A rollout's first token follows within one
        decode step."""
        try:
            reply = lab.servers[region].execute_command(
                "XRANGE", lab.keys.trajectories, str(self._back_ms), "+", "COUNT", 200
            )
        except _AWAY:
            return None
        begun = []
        for _, fields in reply or []:
            try:
                group = decode_group(flat(fields)[b"payload"])
            except (WireError, KeyError):
                continue
            begun += [r.started_ms for r in group.rollouts if r.started_ms >= self._back_ms]
        return (min(begun) - self._back_ms) / 1000 if begun else None

    def checks(self, lab: Lab) -> list[Check]:
        times = {region: f"{s:.2f} s" for region, s in sorted(self.first_token_s.items())}
        self.tables = {
            f"every Redis out of memory for {self.seconds:.0f} s": [
                ("what", "found"),
                ("steps per minute", ", ".join(f"{name}: {rate}" for name, rate in self.rates(lab))),
                *((f"from space to the first new rollout, {region}", shown) for region, shown in times.items()),
            ]
        }
        late = [r for r in lab.regions if self.first_token_s.get(r, float("inf")) > RESUME_TARGET_S]
        return [
            Check("producers stayed", not self.restarted, f"{len(self.restarted)} ended", tuple(self.restarted)),
            Check(
                f"new rollouts within {RESUME_TARGET_S:.0f} s of space", not late, ", ".join(f"{r} {t}" for r, t in times.items())
            ),
        ]  # fmt: skip
