"""The life of one trajectory, from its permit to its fate, out of what the run recorded.

Invariant: a moment has a time only where a record holds that time, and says which record and whose clock that is; what no record
tells is said to be unknown, and nothing is guessed. Held by tests/unit/consumers/test_life.py.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.schemas import fates
from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory_id import TrajectoryId

UNRECORDED = "no record holds its time"
_GROUP = (
    "SELECT * EXCLUDE (prompt_text, text, answer, prompt_token_ids, token_ids, logprobs, learner_logprobs, entropy, factor, kept) "
    "FROM trajectories WHERE region = ? AND producer = ? AND seq = ? ORDER BY sample_index"
)


@dataclass(frozen=True, slots=True)
class Moment:
    """`time_ms`: Unix time, None if no record holds it; `clock`: whose; `record`: where it was read."""

    stage: str
    words: str
    time_ms: int | None = None
    clock: str = ""
    record: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """`moments` in the order of the pipeline (clocks of several machines need not agree); `gaps`: records that should be there and
    are not; `siblings`: other deliveries of the same group index."""

    id: TrajectoryId
    fate: str | None
    moments: list[Moment]
    gaps: list[str] = field(default_factory=list)
    siblings: list[dict[str, Any]] = field(default_factory=list)


def life_of(reader: RunReader, one: TrajectoryId, *, max_age: int | None = None) -> Life:
    """The life of a trajectory, or of a group (`one` without sample).

    Args:
        max_age: of the run's configuration, None if that is not known.

    Raises:
        UsageError: neither the recorder nor the fate log knows of it.
    """
    key = list(one.identity)
    rows = reader.rows(_GROUP, key)
    mine = [row for row in rows if one.sample in (None, row["sample_index"])]
    fate_rows = reader.rows("SELECT * FROM fates WHERE region = ? AND producer = ? AND seq = ?", key)
    fate = fate_rows[0] if fate_rows else _fate_of(rows)
    if not mine and fate is None:
        raise UsageError(f"nothing is known of {one}: neither the recorder nor the fate log has it")
    life = Life(one, fate["fate"] if fate else None, [])
    if mine:
        _sampling(life, mine, rows)
    else:
        life.gaps.append(
            "the recorder has no row of it: its file was dropped for want of space (recorder.retain_bytes), or it was not recorded"
        )
    index = (mine or [fate])[0]["group_index"]  # type: ignore[index]
    life.siblings.extend(_siblings(reader, one, index))
    _ending(life, reader, fate, mine[0] if mine else None, max_age)
    return life


def _sampling(life: Life, mine: list[dict[str, Any]], group: list[dict[str, Any]]) -> None:
    add, row = life.moments.append, mine[0]
    attempt = f", attempt {row['attempt'] + 1} of that index" if row["attempt"] else ""
    clock = f"{row['producer']}'s"
    permit = f"to start group {row['group_index']}{attempt}, given to {row['producer']}"
    add(_told("permit", permit, row["permit_ms"], clock, "trajectory", "before it was submitted"))
    add(Moment("submitted", "to the engine, with its group", row["started_ms"], clock, "trajectory"))
    for one in mine:
        which = "" if len(mine) == 1 else f"rollout {one['sample_index']}: "
        words = f"{which}{_spans(one)}; ended by {one['finish_reason']}"
        add(Moment("sampled", words, one["finished_ms"], clock, "trajectory"))
    last = max(r["finished_ms"] for r in group)
    there = f"{len(group)} of {row['group_size']} rollouts"
    add(Moment("group complete", f"{there}, the last of them finished", last, clock, "trajectories of the group"))
    rewards = ", ".join(f"{one['reward']:g}" for one in mine)
    scored_ms = None if any(one["scored_ms"] is None for one in mine) else max(one["scored_ms"] for one in mine)
    around = "after it was sampled, before the group was spooled"
    add(_told("scored", f"reward {rewards}", scored_ms, clock, "trajectory", around))
    spooled = f"on the producer's disk as its number {row['seq']}"
    add(_told("spooled", spooled, row["spooled_ms"], clock, "trajectory", "between the two beside it"))
    if row["appended_ms"] is not None:
        add(
            Moment(
                "appended",
                f"to the stream of region {row['region']} as entry {row['entry_id']}",
                row["appended_ms"],
                f"{row['region']}'s Redis",
                "entry id",
            )
        )


def _told(stage: str, words: str, time_ms: int | None, clock: str, record: str, around: str = "") -> Moment:
    """A moment of which earlier versions of the program kept no time; `around`: what is known of it then."""
    if time_ms is not None:
        return Moment(stage, words, time_ms, clock, record)
    return Moment(stage, f"{words}: {UNRECORDED}{f'; {around}' if around else ''}")


def _spans(row: dict[str, Any]) -> str:
    spans = [*row["version_spans"], {"start": row["tokens"]}]
    parts = [(b["start"] - a["start"], f"e{a['epoch']}.v{a['version']}") for a, b in itertools.pairwise(spans)]
    return ", then ".join(f"{count} token{'s' if count != 1 else ''} by {policy}" for count, policy in parts)


def _siblings(reader: RunReader, one: TrajectoryId, index: int) -> list[dict[str, Any]]:
    found = reader.rows(
        "SELECT group_id, any_value(attempt) AS attempt, any_value(fate) AS fate, min(appended_ms) AS appended_ms "
        "FROM trajectories WHERE group_index = ? GROUP BY group_id ORDER BY attempt, appended_ms",
        [index],
    )
    return [row for row in found if row["group_id"] != str(one.group)]


def _ending(
    life: Life, reader: RunReader, fate: dict[str, Any] | None, row: dict[str, Any] | None, max_age: int | None
) -> None:
    if fate is None:
        life.moments.append(Moment("delivered", f"to the learner: {UNRECORDED} before it has its fate"))
        life.moments.append(
            Moment("fate", "none yet: it waits in the stream, or the learner holds it for a later batch")
        )
        return
    life.moments.append(_told("delivered", "to the learner", fate["delivered_ms"], "the learner's", "fate log"))
    if fate["admitted_ms"] is not None or fate["fate"] in (*fates.CONSUMED, fates.SURPLUS):
        words = "among those that wait for a batch"
        life.moments.append(_told("admitted", words, fate["admitted_ms"], "the learner's", "fate log"))
    policy = f"e{fate['epoch']}.v{fate['version']}"
    step = fate["version"] + 1
    rule = {
        fates.TRAINED: f"trained in step {step} of epoch {fate['epoch']}, which began with {policy}",
        fates.ZERO_VARIANCE: f"dropped by step {step} of epoch {fate['epoch']}: all rewards of its group are the same, so it has no "
        "gradient (dropped:zero_variance)",
        fates.GATE: f"step {step} of epoch {fate['epoch']} consumed it, and a gate kept that update from the weights (dropped:gate)",
        fates.AGE: f"dropped: too old (dropped:age). Its oldest token was {fate['age']} versions behind {policy}"
        + (
            f", and correction.max_age is {max_age}"
            if max_age is not None
            else "; the run's correction.max_age is not known"
        ),
        fates.DUPLICATE: f"dropped: group {fate['group_index']} had come by another delivery (dropped:duplicate)"
        + "".join(f"; {s['group_id']} is {s['fate'] or 'without a fate'}" for s in life.siblings),
        fates.FALSE_VERSION: f"dropped: a token claims a policy beyond the learner's {policy} (dropped:false_version)",
        fates.SURPLUS: "dropped: the run ended before a step needed it (dropped:surplus)",
    }.get(fate["fate"], f"{fate['fate']}, at {policy}")
    life.moments.append(Moment("fate", rule, fate["time_ms"], "the learner's", "fate log"))
    if fate["fate"] in fates.CONSUMED:
        _training(life, reader, fate, row, step)


def _training(life: Life, reader: RunReader, fate: dict[str, Any], row: dict[str, Any] | None, step: int) -> None:
    one = life.id
    sample = [] if one.sample is None else [one.sample]
    found = reader.rows(
        "SELECT epoch, step, update, sample_index, advantage, weight, ratio_mean, ratio_max, kept_fraction, loss_share, applied "
        f"FROM rollouts WHERE region = ? AND producer = ? AND seq = ?{' AND sample_index = ?' if sample else ''} "
        "ORDER BY epoch, step, update, sample_index",
        [*one.identity, *sample],
    )
    (facts,) = reader.rows("SELECT time_ms, alarms FROM facts WHERE epoch = ? AND step = ?", [fate["epoch"], step]) or [
        None
    ]
    mine = [r for r in found if (r["epoch"], r["step"]) == (fate["epoch"], step)]
    if not mine and one.sample is not None and row is not None and row["weight"] is not None:
        mine = [row | {"update": 0}]  # the record itself is gone, and the recorder joined it while it was there
    for r in mine:
        if r["weight"] is not None:
            which = f"rollout {r['sample_index']}: " if one.sample is None else ""
            later = f" (update {r['update']})" if r["update"] else ""
            words = (
                f"{which}advantage {r['advantage']:+.4g}, weight {r['weight']:.4g} a token, ratio {r['ratio_mean']:.4g} in the mean and "
                f"{r['ratio_max']:.4g} at most, {r['kept_fraction']:.0%} of its tokens kept, {r['loss_share']:+.3g} of the loss{later}"
            )
            life.moments.append(Moment("step", words, facts and facts["time_ms"], "the learner's", "step record"))
    if facts is not None and fate["fate"] == fates.GATE:
        for alarm in json.loads(facts["alarms"] or "[]"):
            life.moments.append(Moment("gate", alarm, facts["time_ms"], "the learner's", "step record"))
    if not mine:
        life.gaps.append(
            f"there is no record of step {step} of epoch {fate['epoch']}: its weight and ratios are unknown"
        )
    for epoch, other in sorted({(r["epoch"], r["step"]) for r in found} - {(fate["epoch"], step)}):
        words = f"step {other} of epoch {epoch} trained on it too, and its result was given up: a later epoch began before it"
        (then,) = reader.rows("SELECT time_ms FROM facts WHERE epoch = ? AND step = ?", [epoch, other]) or [None]
        life.moments.append(Moment("given up", words, then and then["time_ms"], "the learner's", "step record"))
    if fate["fate"] == fates.TRAINED:
        _publication(life, reader, fate["epoch"], step)


def _publication(life: Life, reader: RunReader, epoch: int, step: int) -> None:
    found = reader.rows(
        "SELECT time_ms, label FROM versions WHERE epoch = ? AND version = ? AND kind != 'skip' ORDER BY time_ms LIMIT 1",
        [epoch, step],
    )
    if found:
        words = f"the weights that it helped to make, as e{epoch}.v{step} ({found[0]['label']})"
        life.moments.append(Moment("published", words, found[0]["time_ms"], "the learner's", "versions.jsonl"))
    else:
        life.moments.append(Moment("published", f"as e{epoch}.v{step}: versions.jsonl does not tell of it"))


def _fate_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """As the recorder joined it, where the fate log is not at hand."""
    if not rows or rows[0]["fate"] is None:
        return None
    row = rows[0]
    return {
        "fate": row["fate"], "epoch": row["train_epoch"], "version": row["train_version"], "age": row["age"],
        "time_ms": row["fate_time_ms"], "group_index": row["group_index"], "delivered_ms": row["delivered_ms"],
        "admitted_ms": row["admitted_ms"],
    }  # fmt: skip
