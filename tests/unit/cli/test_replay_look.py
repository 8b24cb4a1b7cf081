"""`anabranch replay` over a recorded run: what it says, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from anabranch.consumers import trajectory_page
from tests.commands import anabranch
from tests.replay_runs import GROUPS, changed, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("look") / "run")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "120")


def replay(run: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return anabranch("replay", *argv, "--run", str(run))


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed; it succeeded and printed nothing that moves a terminal."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "").isprintable()
    return done.stdout


def test_ls_shows_a_page_and_how_many_there_are(run: Path) -> None:
    lines = told(replay(run, "ls", "--limit", "3", "--sort", "reward:desc")).splitlines()
    assert lines[0].split() == ["id", "fate", "step", "age", "sampled", "by", "reward", "advantage", "tokens", "text"]
    assert len(lines) == 6
    assert lines[-1] == "1 to 3 of 14; --page 2 has more"


def test_pages_do_not_overlap_and_leave_nothing_out(run: Path) -> None:
    ids = []
    for page in range(1, 6):
        out = told(replay(run, "ls", "--json", "--limit", "4", "--page", str(page), "--sort", "reward"))
        ids += [json.loads(line)["id"] for line in out.splitlines()]
    assert len(ids) == len(set(ids)) == 14


def test_a_deep_page_is_the_same_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("ls", "--json", "--limit", "4", "--page", "2", "--sort", "reward:desc", "--region", "east")
    shallow = told(replay(run, *argv))
    monkeypatch.setattr(trajectory_page, "DEEP", 1)
    assert told(replay(run, *argv)) == shallow
    assert len(shallow.splitlines()) == 4


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (("--fate", "age"), 2), (("--step", "1"), 4), (("--version", "e2.v1"), 6), (("--text", "script"), 2), (("--region", "east"), 8),
        (("--reward", "..0"), 6), (("--age", "9"), 2), (("--fate", "trained", "--region", "west"), 4),
    ],
)  # fmt: skip
def test_filters(run: Path, argv: tuple[str, ...], count: int) -> None:
    assert len(told(replay(run, "ls", "--json", *argv)).splitlines()) == count


def test_show_tells_everything_of_one(run: Path) -> None:
    out = told(replay(run, "show", "west/1/1"))
    for part in (
        "west/west-0-cd/1/1",
        "trained, 2026-01-01",
        "2 of epoch 2",
        "e1.v0: tokens 0 to 1, e2.v1: tokens 2 to 2",
        "\\x1b[31m<script>",
    ):
        assert part in out
    row = json.loads(told(replay(run, "show", "west/1/1", "--json")))
    assert row["learner_logprobs"] == [-0.5, -1.0, -2.5]


def test_why_tells_the_life_of_a_trajectory_and_of_a_group(run: Path) -> None:
    out = told(replay(run, "why", "east/east-0-ab/3/0"))
    assert "dropped: too old (dropped:age). Its oldest token was 9 versions behind e2.v9" in " ".join(out.split())
    assert "correction.max_age is 8" in " ".join(out.split())
    assert json.loads(told(replay(run, "why", "west/west-0-cd/3", "--json")))["fate"] == "trained"
    short = {text: json.loads(told(replay(run, "why", text, "--json")))["id"] for text in ("east/3/0", "east/3")}
    assert short == {"east/3/0": "east/east-0-ab/3/0", "east/3": "east/east-0-ab/3"}


def test_why_knows_what_the_recorder_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for path in run.rglob("region=west/*.parquet"):
        path.unlink()
    assert "missing: the recorder has no row of it" in told(replay(run, "why", "west/west-0-cd/1"))


def test_diff_and_group(run: Path) -> None:
    assert "1 tokens in common, then they part" in told(replay(run, "diff", "east/1/0", "east/1/1"))
    assert json.loads(told(replay(run, "diff", "east/1/0", "east/1/1", "--json")))["common_tokens"] == 1
    assert "/0  reward 0" in told(replay(run, "group", "east/1"))
    assert len(told(replay(run, "group", "east/1", "--json")).splitlines()) == 2


def test_sql(run: Path) -> None:
    out = told(
        replay(run, "sql", "SELECT fate, count(*) AS n FROM trajectories GROUP BY ALL ORDER BY n DESC, fate LIMIT 2")
    )
    assert out.splitlines() == ["fate         n", "trained      6", "dropped:age  2"]
    assert json.loads(told(replay(run, "sql", "SELECT 1 AS a, 'x' AS b", "--json"))) == {"a": 1, "b": "x"}
    assert "\\x1b[31m" in told(
        replay(run, "sql", "SELECT text FROM trajectories WHERE region = 'west' ORDER BY ALL DESC")
    )
    cut = replay(run, "sql", "FROM trajectories", "--limit", "2")
    assert len(cut.stdout.splitlines()) == 3
    assert "only the first 2 rows" in cut.stderr


def test_export_and_rescore_and_account(run: Path, tmp_path: Path) -> None:
    assert (
        told(replay(run, "export", str(tmp_path / "a.parquet"), "--step", "1"))
        == f"4 trajectories in {tmp_path}/a.parquet\n"
    )
    (tmp_path / "mine.py").write_text("def reward(prompt, text, answer):\n    return 1\n")
    out = told(replay(run, "rescore", "--with", f"{tmp_path}/mine.py:reward"))
    assert "14 trajectories scored anew, 7 rewards change (50.00%)" in out
    assert "14 not scored" in told(replay(run, "rescore", "--task"))
    assert told(replay(run, "account")) == "7 groups: 6 have a whole life in the records, 1 have no fate yet\n"


def test_an_account_with_gaps_is_1(tmp_path: Path) -> None:
    done = replay(write_run(tmp_path / "run", steps=False), "account", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["gaps"] == {"no step record": 4}


def test_an_account_of_a_run_of_before_there_were_times(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [changed(one, timed=False) for one in GROUPS])
    done = replay(run, "account")
    assert done.returncode == 1
    assert "6 times missing: no record holds the time of one of its moments" in done.stdout
    assert told(replay(run, "account", "--without-times")).startswith("7 groups: 6 have a whole life")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("show", "1/0"), "not unique: east/east-0-ab/1/0, west/west-0-cd/1/0"),
        (("show", "east/99/0"), "nearest: east/east-0-ab/4/0"),
        (("why", "mars/p/1/0"), "no producer 'mars/p'"),
        (("ls", "--sort", "rewad"), "did you mean 'reward'?"),
        (("ls", "--fate", "agee"), "did you mean 'dropped:age'?"),
        (("ls", "--step", "x"), "is not a step"),
        (("sql", "DROP TABLE fates"), "a statement of kind DROP is not run"),
        (("sql", "SELECT * FROM read_text('/etc/passwd')"), "reads the views of the run and no other files"),
        (("export", "-", "--columns", "idd"), "did you mean 'id'?"),
        (("recompute", "east/1/0", "--version", "3"), "--version needs --config"),
    ],
)
def test_a_mistake_is_one_line_and_2(run: Path, argv: tuple[str, ...], message: str) -> None:
    done = replay(run, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_run_that_is_none(run: Path) -> None:
    done = replay(run.parent / "rum", "ls")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("nearest in " + str(run.parent) + ": run\n")


def test_streams_need_a_configuration(run: Path) -> None:
    done = replay(run, "ls", "--streams")
    assert done.returncode == 2
    assert "--streams needs --config" in done.stderr
