from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from anabranch.deploy.chaos import report
from anabranch.deploy.chaos.ending import Ending
from anabranch.deploy.chaos.evidence import Evidence, RegionBooks
from anabranch.deploy.chaos.exits import Exits
from anabranch.deploy.chaos.monitor import Sample, Watch
from anabranch.deploy.chaos.verdict import Check
from anabranch.schemas.config import RunConfig


def fault(kind: str, heal_s: float | None) -> dict[str, object]:
    return {
        "kind": kind,
        "target": "east",
        "what": kind,
        "phase": "healed",
        "injected_s": 103.0,
        "lifted_s": 105.0,
        "heal_s": heal_s,
    }


def end(watch: Watch, *checks: Check) -> Ending:
    evidence = Evidence(books={"east": RegionBooks(produced=3, added=4, fates={"trained": 2, "dropped:age": 1})})
    exits = Exits(noted=Counter({("learner", "killed by SIGKILL"): 2}))
    return Ending(list(checks), evidence, watch, 100.0, exits, RunConfig(), 2, [("redis-east", 1676)])


def test_tables_json_and_plot(tmp_path: Path) -> None:
    watch = Watch(steps=[101.0, 102.0, 109.0])
    watch.samples = [Sample(1.0, 1, {"east": 3}), Sample(2.0, 2, {"east": None})]
    watch.waits.longest["learner", "N more groups | of N"] = 12.0
    faults = [fault("kill learner", 10.0), fault("kill learner", 20.0), fault("link cut", None)]
    facts = {"scenario": "random", "ended": "", "wall_s": 60.0, "faults": faults, "left_out": {"clock": "no faketime"}}
    checks = (Check("groups lost", False, "1 of 9", ("east p/3",)), Check("steps made", True, "3"))
    report.write(tmp_path / "out" / "README.md", end(watch, *checks), facts)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "**not every check held**" in text
    assert "| groups lost | 1 of 9 | **fails** |" in text
    assert "- groups lost: east p/3" in text
    assert "| kill learner | 2 | 2 | 15.0 | 20.0 |" in text
    assert "| link cut | 1 | 0 |  |  |" in text
    assert "Left out: clock: no faketime." in text
    assert "| learner | N more groups / of N | 12 s |" in text
    assert "| east | 3 | 1 | 0 | dropped:age 1, trained 2 |" in text
    assert "| learner: killed by SIGKILL | 2 |" in text
    assert "longest time without one 7 s" in text
    stored = json.loads((tmp_path / "out" / "README.json").read_text())
    assert (stored["held"], stored["faults"][0]["injected_s"]) == (False, 3.0)
    root = ElementTree.parse(tmp_path / "out" / "README.svg").getroot()
    assert root.tag.endswith("svg")


def test_a_run_without_anything_is_written_too(tmp_path: Path) -> None:
    facts = {
        "scenario": "cut",
        "ended": "interrupted by SIGINT",
        "wall_s": 1.0,
        "tables": {"cut": [("what", "found"), ("x", 1)]},
    }
    report.write(tmp_path / "cut.md", end(Watch(), Check("steps made", True, "0")), facts)
    text = (tmp_path / "cut.md").read_text()
    assert "(ended early: interrupted by SIGINT)" in text
    assert "| x | 1 |" in text
    assert (tmp_path / "cut.svg").exists()
