"""How the processes of a chaos run behaved: exits, tracebacks, waits, faults that healed, steps made.

Invariant: pure; an exit code that nobody should see, a wait beyond its deadline, or a fault whose traces stayed fails the run.
Held by tests/unit/deploy/chaos/test_conduct.py.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

from anabranch.deploy.chaos.fault import Fault, Phase
from anabranch.deploy.chaos.verdict import Check
from anabranch.deploy.chaos.waits import Wait
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import EXIT_OK, EXIT_TEMPORARY

TOLERANCE_S = 15.0  # looks are a second apart, and two busy cores late
_EXPECTED = {-signal.SIGKILL, -signal.SIGTERM, EXIT_OK, EXIT_TEMPORARY}


def exits_check(codes: Mapping[str, Sequence[int]]) -> Check:
    """Allowed: killed by a fault or the watchdog, told to stop, 75 (and then started again)."""
    wrong = [f"{name}: exit {code}" for name, ends in codes.items() for code in ends if code not in _EXPECTED]
    kinds = Counter(code for ends in codes.values() for code in ends)
    return Check("exits that nobody should see", not wrong, _counted(kinds), tuple(wrong[:5]))


def tracebacks_check(found: Sequence[str]) -> Check:
    return Check("tracebacks in the logs", not found, str(len(found)), tuple(found[:5]))


def deadline_s(wait: Wait, config: RunConfig) -> float:
    """How long this wait may last by the configuration."""
    if wait.who == "learner" and "group" in wait.what:
        return config.learner.batch_deadline_s
    if any(word in wait.what for word in ("spool", "disk", "to append")):  # as producers/outbox.py says it
        return config.spool.full_deadline_s
    return max(config.channel.connect_deadline_s, config.learner.batch_deadline_s)


def waits_check(waits: Sequence[Wait], config: RunConfig) -> Check:
    beyond = [w for w in waits if w.seconds > deadline_s(w, config) + TOLERANCE_S]
    longest = max((w.seconds for w in waits), default=0.0)
    shown = tuple(f"{w.who} waited {w.seconds:.0f} s for {w.what}" for w in beyond[:5])
    return Check("waits beyond their deadline", not beyond, f"{len(beyond)}; the longest {longest:.0f} s", shown)


def faults_check(faults: Sequence[Fault], planned: int) -> Check:
    healed = sum(fault.phase is Phase.HEALED for fault in faults)
    wrong = [fault.describe() for fault in faults if fault.phase is not Phase.HEALED]
    return Check(
        "faults injected and healed", not wrong and healed == planned, f"{healed} of {planned}", tuple(wrong[:5])
    )


def steps_check(steps: int, least: int) -> Check:
    return Check("steps made", steps >= least, f"{steps}, at least {least}")


def _counted(codes: Counter[int]) -> str:
    words = {-9: "SIGKILL", -15: "SIGTERM", 0: "exit 0"}
    return ", ".join(f"{n} × {words.get(code, f'exit {code}')}" for code, n in sorted(codes.items())) or "none"
