"""The end of a chaos run: evidence while the servers still run, the verdict, and what is kept of it.

Invariant: logs, fate log, spools and metrics are copied out of the run's disks, which vanish with it, before anything is
judged. Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from anabranch.deploy.chaos import conduct, report
from anabranch.deploy.chaos.evidence import Evidence, Identity, read_books, read_fate_lines, read_spools
from anabranch.deploy.chaos.exits import Exits
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.lives import lives_check
from anabranch.deploy.chaos.monitor import JsonTail, Watch
from anabranch.deploy.chaos.scenario import Scenario
from anabranch.deploy.chaos.verdict import Check, judge
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import EXIT_OK, EXIT_TEMPORARY
from anabranch.transport.metrics_log import METRICS_FILE

EVIDENCE = "evidence"
_CHECKS_FAILED = 1


@dataclass
class Ending:
    checks: list[Check]
    evidence: Evidence
    watch: Watch
    began: float
    exits: Exits
    config: RunConfig
    link_starts: int
    mended: list[tuple[str, int]]


def collect(lab: Lab, exits: Exits, scenario: Scenario) -> Ending:
    """Called when the clients have ended and the servers have not."""
    lab.monitor.close()
    kept = lab.place.directory / EVIDENCE
    run_directory = lab.place.run_directory
    with contextlib.suppress(shutil.Error, OSError):
        shutil.copytree(
            run_directory, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", ".filler")
        )
    evidence = Evidence()
    evidence.fates, evidence.damage = read_fate_lines(run_directory / "fates")
    for line in evidence.fates:
        evidence.saw(line.identity)
    for region in lab.regions:
        with contextlib.suppress(shutil.Error, OSError):
            shutil.copytree(lab.place.spool(region), kept / "spool" / region, dirs_exist_ok=True)
        spooled, damage = read_spools(lab.place.spool(region), region)
        evidence.damage += damage
        for identity in spooled:
            evidence.spooled[identity] = 1
            evidence.saw(identity)
        try:
            books = evidence.books[region] = read_books(lab.servers[region], lab.keys, region)
        except (redis.RedisError, OSError) as error:
            evidence.missing.append(f"the Redis of region {region}: {error}")
            continue
        for producer, seq in books.known.items():
            evidence.saw(Identity(region, producer, seq))
    for (region, producer), seq in lab.monitor.watch.seen.items():
        evidence.saw(Identity(region, producer, seq))
    steps = [
        record["step"] for record in JsonTail(run_directory / METRICS_FILE).poll() if record.get("event") == "step"
    ]
    if steps:
        evidence.consumed_by_steps = steps[-1] * lab.place.config.learner.groups_per_step
    for wait in scenario.waits(lab):
        lab.monitor.watch.waits.add(wait)
    config = lab.place.config
    checks = [
        *judge(evidence),
        lives_check(run_directory, evidence),
        conduct.exits_check(exits.codes),
        conduct.tracebacks_check(tracebacks(lab.place.directory / "logs")),
        conduct.waits_check(lab.monitor.watch.waits.worst(), config),
        *scenario.checks(lab),
    ]
    starts = sum(link.starts for link in lab.links.values())
    return Ending(checks, evidence, lab.monitor.watch, lab.monitor.began, exits, config, starts, list(lab.mended))


def conclude(
    ending: Ending, scenario: Scenario, report_to: Path | None, directory: Path, *, ended: str, wall_s: float
) -> int:
    """Write the report, say the verdict; the exit code."""
    facts: dict[str, Any] = {**scenario.facts(), "scenario": scenario.name, "ended": ended, "wall_s": wall_s}
    facts["mended"] = ending.mended
    target = report_to or directory / "report.md"
    report.write(target, ending, facts)
    for check in ending.checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}", file=sys.stderr)
        for example in check.examples:
            print(f"       {example}", file=sys.stderr)
    if ended:
        print(f"chaos: ended early: {ended}", file=sys.stderr)
    print(
        json.dumps({"event": "result", "held": not ended and all(c.ok for c in ending.checks), "report": str(target)})
    )
    if ended:
        return EXIT_TEMPORARY
    return EXIT_OK if all(check.ok for check in ending.checks) else _CHECKS_FAILED


def tracebacks(logs: Path) -> list[str]:
    """Where a traceback stands, with its last line."""
    found = []
    for path in sorted(logs.glob("*.log")):
        text = path.read_text(errors="replace")
        for match in re.finditer(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*(.*)", text, re.M):
            found.append(f"{path.name}: {match[1][:160]}")
    return found
