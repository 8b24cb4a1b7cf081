"""A trajectory's life is what the records tell, and what they do not tell is not guessed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from anabranch.consumers.life import UNRECORDED, Life, life_of
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory_id import parse_id
from tests.replay_runs import GROUPS, PRODUCERS, T0_MS, changed, write_fates, write_run, write_steps
from tests.step_records import facts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def life(directory: Path, text: str, **known: int) -> Life:
    with RunReader(directory) as reader:
        return life_of(reader, parse_id(text), **known)


def words(found: Life, stage: str) -> list[str]:
    return [moment.words for moment in found.moments if moment.stage == stage]


def times(found: Life) -> dict[str, int | None]:
    return {moment.stage: moment.time_ms for moment in found.moments}


def test_a_trained_one_from_permit_to_publication(run: Path) -> None:
    found = life(run, "east/east-0-ab/1/1")
    assert [m.stage for m in found.moments] == [
        "permit", "submitted", "sampled", "group complete", "scored", "spooled", "appended", "delivered", "admitted", "fate", "step",
        "published",
    ]  # fmt: skip
    assert (found.fate, found.gaps, found.siblings) == ("trained", [], [])
    assert times(found) == {
        "permit": T0_MS - 100, "submitted": T0_MS, "sampled": T0_MS + 501, "group complete": T0_MS + 501, "scored": T0_MS + 601,
        "spooled": T0_MS + 700, "appended": T0_MS + 10_000, "delivered": T0_MS + 20_000, "admitted": T0_MS + 20_100,
        "fate": T0_MS + 60_000, "step": 1, "published": T0_MS + 1,
    }  # fmt: skip
    assert words(found, "fate") == ["trained in step 1 of epoch 1, which began with e1.v0"]
    assert words(found, "step")[0].startswith(
        "advantage +0.5, weight 0.25 a token, ratio 1 in the mean and 1.5 at most"
    )


@pytest.mark.parametrize("timed", [True, False])
def test_a_time_is_given_only_where_a_record_holds_it(tmp_path: Path, timed: bool) -> None:
    groups = [changed(one, timed=timed) for one in GROUPS]
    run = write_run(tmp_path / "run", groups)
    for group in groups:
        for moment in life(run, f"{group.region}/{PRODUCERS[group.region]}/{group.seq}/0").moments:
            assert (moment.time_ms is None) == (moment.record == ""), moment
            assert (moment.clock == "") == (moment.record == ""), moment
            if moment.stage in ("permit", "scored", "spooled", "delivered", "admitted"):
                told = timed and not (moment.stage == "delivered" and not group.fate)
                assert (UNRECORDED in moment.words) != told, moment


def test_what_was_refused_at_its_arrival_was_never_admitted(tmp_path: Path) -> None:
    refused, swept = GROUPS[2], changed(GROUPS[2], fate="trained")
    assert "admitted" not in times(life(write_run(tmp_path / "refused", [refused]), "east/east-0-ab/3/0"))
    later = swept.record().model_copy(update={"fate": "dropped:age"})
    run = write_run(tmp_path / "swept", [refused])
    (run / "fates" / "000001.jsonl").write_bytes(later.line())
    found = life(run, "east/east-0-ab/3/0")
    assert times(found)["admitted"] == T0_MS + 22_100
    assert "too old" in words(found, "fate")[0]


def test_versions_in_the_order_in_which_they_sampled(run: Path) -> None:
    assert words(life(run, "west/west-0-cd/1/0"), "sampled") == [
        "2 tokens by e1.v0, then 1 token by e2.v1; ended by stop"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("east/east-0-ab/2/0", "all rewards of its group are the same"),
        ("east/east-0-ab/3/0", "Its oldest token was 9 versions behind e2.v9, and correction.max_age is 8"),
        ("east/east-0-ab/4/1", "group 5 had come by another delivery (dropped:duplicate); west/west-0-cd/3 is trained"),
        ("west/west-0-cd/2/0", "none yet"),
    ],
)
def test_the_rule_that_decided(run: Path, text: str, told: str) -> None:
    assert told in words(life(run, text, max_age=8), "fate")[0]


def test_a_group_and_each_of_its_rollouts(run: Path) -> None:
    found = life(run, "west/west-0-cd/3")
    assert [w.partition(":")[0] for w in words(found, "sampled")] == ["rollout 0", "rollout 1"]
    assert words(found, "scored") == ["reward 0, 0.25"]
    assert times(found)["scored"] == T0_MS + 5_601, "the last of them"
    assert [w.partition(":")[0] for w in words(found, "step")] == ["rollout 0", "rollout 1"]
    assert [(s["group_id"], s["fate"]) for s in found.siblings] == [("east/east-0-ab/4", "dropped:duplicate")]


def test_a_gate_tells_its_bound(tmp_path: Path) -> None:
    gated = changed(GROUPS[0], fate="dropped:gate")
    run = write_run(tmp_path / "run", [gated])
    write_steps(run, [changed(gated, fate="trained")])
    path = next(run.rglob("facts.json"))
    path.write_bytes(facts(epoch=1, version_before=0, step=1, now="e1.v0", alarms=["grad_norm 9 > 1"]).to_json())
    found = life(run, "east/east-0-ab/1/0")
    assert "a gate kept that update from the weights" in words(found, "fate")[0]
    assert words(found, "gate") == ["grad_norm 9 > 1"]


def test_a_step_whose_record_is_missing_is_a_gap(run: Path) -> None:
    shutil.rmtree(run / "steps")
    found = life(run, "east/east-0-ab/1/0")
    assert found.gaps == ["there is no record of step 1 of epoch 1: its weight and ratios are unknown"]
    assert words(found, "step") == []


def test_a_row_that_the_recorder_lost_is_a_gap_and_its_fate_is_told(run: Path) -> None:
    shutil.rmtree(run / "trajectories")
    found = life(run, "east/east-0-ab/3/0")
    assert found.fate == "dropped:age"
    assert "the recorder has no row of it" in found.gaps[0]


def test_a_step_that_was_given_up_is_told_beside_the_one_that_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", GROUPS[:1])
    again = changed(GROUPS[0], policy=changed(GROUPS[3]).policy)
    write_steps(run, [again])
    write_fates(run, [again])
    found = life(run, "east/east-0-ab/1/0")
    assert words(found, "fate") == ["trained in step 2 of epoch 2, which began with e2.v1"]
    assert words(found, "given up") == [
        "step 1 of epoch 1 trained on it too, and its result was given up: a later epoch began before it"
    ]


def test_what_nobody_knows_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="nothing is known"):
        life(run, "east/east-0-ab/99/0")
