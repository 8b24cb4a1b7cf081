"""The report of a chaos run: Markdown, the same as JSON beside it, and a plot.

Invariant: everything in it is measured in this run; the JSON holds what the tables were made from.
Held by tests/unit/deploy/chaos/test_report.py.
"""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.deploy.chaos import conduct, plot
from anabranch.deploy.summary import machine_facts
from anabranch.transport.files import write_atomically
from anabranch.transport.redact import redact_text

if TYPE_CHECKING:
    from anabranch.deploy.chaos.ending import Ending

_WAITS_SHOWN = 12


def write(target: Path, ending: Ending, facts: dict[str, Any]) -> None:
    """`target` (Markdown), and TARGET.json and TARGET.svg beside it under the same stem."""
    target.parent.mkdir(parents=True, exist_ok=True)
    facts = {**facts, "command": command(), "machine": machine_facts(), "held": all(c.ok for c in ending.checks)}
    facts["checks"] = [{"name": c.name, "ok": c.ok, "found": c.found, "examples": c.examples} for c in ending.checks]
    facts["waits"] = [
        {"who": w.who, "for": w.what, "longest_s": round(w.seconds, 1), "deadline_s": conduct.deadline_s(w, ending.config)}
        for w in ending.watch.waits.worst()
    ]  # fmt: skip
    facts["exits"] = {f"{name}: {words}": n for (name, words), n in sorted(ending.exits.noted.items())}
    facts["steps"], facts["longest_gap_s"] = len(ending.watch.steps), longest_gap(ending.watch.steps)
    facts["ledger"] = {r: {"produced": b.produced, "foreign": b.foreign, "pending": b.pending, "fates": b.fates}
                       for r, b in ending.evidence.books.items()}  # fmt: skip
    for fault in (*facts.get("faults", ()), *facts.get("marks", ())):
        for key in ("injected_s", "lifted_s"):
            fault[key] = round(fault[key] - ending.began, 1) if fault[key] else None
        fault["heal_s"] = None if fault["heal_s"] is None else round(fault["heal_s"], 1)
    write_atomically(target.with_suffix(".json"), (json.dumps(facts, indent=1) + "\n").encode())
    drawing = target.with_suffix(".svg")
    plot.draw(drawing, ending.watch, ending.began, facts)
    write_atomically(target, markdown(facts, drawing.name).encode())


def markdown(facts: dict[str, Any], drawing: str) -> str:
    lines = [f"# Chaos run: {facts['scenario']}", ""]
    held = "every check held" if facts["held"] and not facts["ended"] else "**not every check held**"
    machine = facts["machine"]
    lines += [
        f"`{facts['command']}`, {facts['wall_s'] / 60:.1f} minutes, {held}"
        + (f" (ended early: {facts['ended']})" if facts["ended"] else "") + ".",
        f"{machine['cores']} cores, {machine['processor']}, {machine['memory_gb']} GB; {facts['steps']} steps, "
        f"longest time without one {facts['longest_gap_s']:.0f} s.", "",
    ]  # fmt: skip
    lines += ["## Verdict", ""]
    lines += _table(
        ("check", "found", ""), [(c["name"], c["found"], "ok" if c["ok"] else "**fails**") for c in facts["checks"]]
    )
    for check in facts["checks"]:
        lines += [f"- {check['name']}: {example}" for example in check["examples"]]
    if facts.get("faults"):
        lines += ["", "## Faults", "", "Time to heal: from when the condition ended (a kill: at once; a freeze beyond the watchdog: "
                  "when that ended it) until everything it touched was seen at work again, other faults notwithstanding.", ""]  # fmt: skip
        lines += _table(("kind", "faults", "healed", "median s", "longest s"), kinds(facts["faults"]))
    for kind, why in facts.get("left_out", {}).items():
        lines += ["", f"Left out: {kind}: {why}."]
    for server, size in facts.get("mended", ()):
        lines += ["", f"The append-only file of {server} had a hole of {size:,} zero bytes after a full disk, and the server did not start: "
                  "closed as by `anabranch stream mend-aof FILE`."]  # fmt: skip
    for title, rows in facts.get("tables", {}).items():
        lines += ["", f"## {title}", "", *_table(tuple(rows[0]), [tuple(map(str, row)) for row in rows[1:]])]
    lines += [
        "",
        "## Waits",
        "",
        "The longest that a process said it waits for one thing, without a step or group in between.",
        "",
    ]
    waits = [(w["who"], w["for"], f"{w['longest_s']:.0f} s", f"{w['deadline_s']:.0f} s") for w in facts["waits"]]
    lines += _table(("process", "waits for", "longest", "deadline"), waits[:_WAITS_SHOWN])
    lines += ["", "## Ledger", ""]
    lines += _table(("region", "produced", "foreign", "pending", "fates"), [
        (region, str(b["produced"]), str(b["foreign"]), str(b["pending"]),
         ", ".join(f"{name} {n}" for name, n in sorted(b["fates"].items()))) for region, b in facts["ledger"].items()
    ])  # fmt: skip
    lines += ["", "## Exits", ""]
    lines += _table(("process", "times"), [(name, str(n)) for name, n in facts["exits"].items()])
    lines += ["", f"![steps and pending groups over time, with the faults]({drawing})", ""]
    return "\n".join(lines)


def kinds(faults: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each kind, most frequent first."""
    rows = []
    for kind in sorted({fault["kind"] for fault in faults}):
        mine = [fault for fault in faults if fault["kind"] == kind]
        times = [fault["heal_s"] for fault in mine if fault["heal_s"] is not None]
        median, longest = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        rows.append((kind, str(len(mine)), str(len(times)), median, longest))
    return sorted(rows, key=lambda row: -int(row[1]))


def longest_gap(times: list[float]) -> float:
    """Seconds between two steps at most; 0 with fewer than two."""
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def command() -> str:
    return redact_text(shlex.join(["anabranch", *sys.argv[1:]]))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
