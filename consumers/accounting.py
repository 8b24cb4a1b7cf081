"""Whether every trajectory of a run has a whole life in its records, or a gap that has a name.

Invariant: each group that the recorder, the fate log or a step's record knows of is counted once: whole, open (no fate yet), or
under exactly one gap. Held by tests/unit/consumers/test_accounting.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.fates import Identity

EXAMPLES = 20

# Gap -> what it means.
GAPS = {
    "not recorded": "it has a fate, and the recorder has no row of it",
    "no step record": "a step consumed it, and there is no record of that step, nor was it joined",
    "not in its step": "a step consumed it, and that step's record lacks rollouts of it",
    "trained without a fate": "a step's record has it, no later step was given up, and the fate log does not know it",
    "rollouts missing": "the recorder has fewer rollouts of it than its fate counts",
    "recorded twice": "the recorder has a rollout of it more than once",
    "times missing": "no record holds the time of one of its moments between permit and fate: a program before trajectory schema 1.2 had part in it",
}
_SQL = """
WITH recorded AS (
  SELECT region, producer, seq, count(*) AS rows, count(DISTINCT sample_index) AS samples, any_value(fate) AS fate,
    any_value(train_epoch) AS epoch, any_value(step) AS step, count(weight) AS weighted,
    any_value(delivered_ms) AS delivered_ms, any_value(admitted_ms) AS admitted_ms,
    bool_and(permit_ms + started_ms + finished_ms + scored_ms + spooled_ms + appended_ms IS NOT NULL) AS sent_with_times
  FROM trajectories GROUP BY ALL),
logged AS (SELECT region, producer, seq, any_value(fate) AS fate, any_value(epoch) AS epoch, any_value(version) + 1 AS step,
    any_value(rollouts) AS rollouts, any_value(delivered_ms) AS delivered_ms, any_value(admitted_ms) AS admitted_ms FROM fates GROUP BY ALL),
trained AS (SELECT region, producer, seq, epoch, step, count(DISTINCT sample_index) AS samples FROM rollouts GROUP BY ALL),
newest AS (SELECT region, producer, seq, max(epoch) AS epoch FROM trained GROUP BY ALL),
known AS (SELECT region, producer, seq FROM recorded UNION SELECT region, producer, seq FROM logged
  UNION SELECT region, producer, seq FROM newest WHERE epoch = (SELECT max(epoch) FROM facts)),
joined AS (
  SELECT k.*, r.rows, r.samples, r.weighted, coalesce(l.fate, r.fate) AS fate, l.rollouts,
    coalesce(l.epoch, r.epoch) AS epoch, coalesce(l.step, r.step) AS step, r.sent_with_times,
    coalesce(l.delivered_ms, r.delivered_ms) AS delivered_ms, coalesce(l.admitted_ms, r.admitted_ms) AS admitted_ms,
    n.epoch IS NOT NULL AND n.epoch = (SELECT max(epoch) FROM facts) AS in_newest
  FROM known k LEFT JOIN recorded r USING (region, producer, seq) LEFT JOIN logged l USING (region, producer, seq)
  LEFT JOIN newest n USING (region, producer, seq)),
judged AS (
  SELECT j.*, fate IN ('trained', 'dropped:zero_variance', 'dropped:gate') AS consumed, f.epoch IS NOT NULL AS has_step,
    t.samples AS in_step FROM joined j
  LEFT JOIN facts f ON f.epoch = j.epoch AND f.step = j.step
  LEFT JOIN trained t ON t.region = j.region AND t.producer = j.producer AND t.seq = j.seq AND t.epoch = j.epoch AND t.step = j.step)
SELECT region, producer, seq, coalesce(rows, 0) AS rows, CASE
    WHEN rows > samples THEN 'recorded twice'
    WHEN fate IS NULL AND rows IS NULL THEN 'trained without a fate'
    WHEN fate IS NULL AND in_newest THEN 'trained without a fate'
    WHEN fate IS NULL THEN 'open'
    WHEN rows IS NULL THEN 'not recorded'
    WHEN rollouts > samples THEN 'rollouts missing'
    WHEN consumed AND NOT has_step AND weighted = 0 THEN 'no step record'
    WHEN consumed AND has_step AND coalesce(in_step, 0) < samples THEN 'not in its step'
    WHEN ? AND NOT (sent_with_times AND delivered_ms IS NOT NULL AND (admitted_ms IS NOT NULL OR NOT consumed)) THEN 'times missing'
    ELSE 'whole' END AS verdict
FROM judged
"""


@dataclass(frozen=True, slots=True)
class Account:
    """Groups: `whole` and `open` ones, and `gaps`: name in `GAPS` -> how many; `examples`: gap -> ids of some groups."""

    whole: int
    open: int
    gaps: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        return self.whole + self.open + sum(self.gaps.values())

    @property
    def complete(self) -> bool:
        return not self.gaps and not self.open


@dataclass(frozen=True, slots=True)
class Judged:
    """A group: how many rollouts of it are recorded, and "whole", "open" or a name of `GAPS`."""

    rollouts: int
    verdict: str


def judge(reader: RunReader, *, times: bool = True) -> dict[Identity, Judged]:
    """Every group of the run; arguments and errors as of `account`."""
    rows = reader.rows(_SQL, [times])
    return {(row["region"], row["producer"], row["seq"]): Judged(row["rows"], row["verdict"]) for row in rows}


def account(reader: RunReader, *, times: bool = True) -> Account:
    """Every group of the run, judged.

    Args:
        times: a life is whole only if each of its moments from permit to fate has a time; False for runs of earlier versions.

    Raises TemporaryError: files kept changing.
    """
    rows = reader.rows(
        "SELECT verdict, count(*) AS groups, list(url_encode(region) || '/' || url_encode(producer) || '/' || seq "
        f"ORDER BY region, producer, seq)[:{EXAMPLES}] AS ids FROM ({_SQL}) GROUP BY verdict ORDER BY verdict",
        [times],
    )
    counts = {row["verdict"]: row["groups"] for row in rows}
    ids = {row["verdict"]: row["ids"] for row in rows}
    gaps = {name: counts[name] for name in GAPS if name in counts}
    return Account(counts.get("whole", 0), counts.get("open", 0), gaps, {name: ids[name] for name in gaps})
