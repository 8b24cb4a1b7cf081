"""Whether every trajectory of a run has a whole life in its records, or a gap that has a name.

Invariant: each group that the recorder, the fate log or a step's record knows of is counted once: whole, open (no fate yet), or
under exactly one gap. Held by tests/unit/consumers/test_accounting.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.consumers.run_reader import RunReader

EXAMPLES = 20

# Gap -> what it means.
GAPS = {
    "not recorded": "it has a fate, and the recorder has no row of it",
    "no step record": "a step consumed it, and there is no record of that step, nor was it joined",
    "not in its step": "a step consumed it, and that step's record lacks rollouts of it",
    "trained without a fate": "a step's record has it, no later step was given up, and the fate log does not know it",
    "rollouts missing": "the recorder has fewer rollouts of it than its fate counts",
    "recorded twice": "the recorder has a rollout of it more than once",
}
_SQL = """
WITH recorded AS (
  SELECT region, producer, seq, count(*) AS rows, count(DISTINCT sample_index) AS samples, any_value(fate) AS fate,
    any_value(train_epoch) AS epoch, any_value(step) AS step, count(weight) AS weighted
  FROM trajectories GROUP BY ALL),
logged AS (SELECT region, producer, seq, any_value(fate) AS fate, any_value(epoch) AS epoch, any_value(version) + 1 AS step,
    any_value(rollouts) AS rollouts FROM fates GROUP BY ALL),
trained AS (SELECT region, producer, seq, epoch, step, count(DISTINCT sample_index) AS samples FROM rollouts GROUP BY ALL),
newest AS (SELECT region, producer, seq, max(epoch) AS epoch FROM trained GROUP BY ALL),
known AS (SELECT region, producer, seq FROM recorded UNION SELECT region, producer, seq FROM logged
  UNION SELECT region, producer, seq FROM newest WHERE epoch = (SELECT max(epoch) FROM facts)),
joined AS (
  SELECT k.*, r.rows, r.samples, r.weighted, coalesce(l.fate, r.fate) AS fate, l.rollouts,
    coalesce(l.epoch, r.epoch) AS epoch, coalesce(l.step, r.step) AS step,
    n.epoch IS NOT NULL AND n.epoch = (SELECT max(epoch) FROM facts) AS in_newest
  FROM known k LEFT JOIN recorded r USING (region, producer, seq) LEFT JOIN logged l USING (region, producer, seq)
  LEFT JOIN newest n USING (region, producer, seq)),
judged AS (
  SELECT j.*, f.epoch IS NOT NULL AS has_step, t.samples AS in_step FROM joined j
  LEFT JOIN facts f ON f.epoch = j.epoch AND f.step = j.step
  LEFT JOIN trained t ON t.region = j.region AND t.producer = j.producer AND t.seq = j.seq AND t.epoch = j.epoch AND t.step = j.step)
SELECT url_encode(region) || '/' || url_encode(producer) || '/' || seq AS id, CASE
    WHEN rows > samples THEN 'recorded twice'
    WHEN fate IS NULL AND rows IS NULL THEN 'trained without a fate'
    WHEN fate IS NULL AND in_newest THEN 'trained without a fate'
    WHEN fate IS NULL THEN 'open'
    WHEN rows IS NULL THEN 'not recorded'
    WHEN rollouts > samples THEN 'rollouts missing'
    WHEN NOT (fate IN ('trained', 'dropped:zero_variance', 'dropped:gate')) THEN 'whole'
    WHEN NOT has_step AND weighted = 0 THEN 'no step record'
    WHEN has_step AND coalesce(in_step, 0) < samples THEN 'not in its step'
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


def account(reader: RunReader) -> Account:
    """Every group of the run, judged. Raises TemporaryError: files kept changing."""
    rows = reader.rows(
        "SELECT verdict, count(*) AS groups, list(id ORDER BY id)[:?] AS ids "
        f"FROM ({_SQL}) GROUP BY verdict ORDER BY verdict",
        [EXAMPLES],
    )
    counts = {row["verdict"]: row["groups"] for row in rows}
    ids = {row["verdict"]: row["ids"] for row in rows}
    gaps = {name: counts[name] for name in GAPS if name in counts}
    return Account(counts.get("whole", 0), counts.get("open", 0), gaps, {name: ids[name] for name in gaps})
