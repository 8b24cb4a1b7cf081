"""`anabranch bench soak`: real processes deliver all groups, and memory that grows is told from memory that does not."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.deploy import bench_soak
from anabranch.deploy.bench_soak import PROCESSES, Memory, Sample, Soak, as_json, judge, plot, soak, table
from anabranch.schemas.errors import DeadlineError, TemporaryError

pytestmark = pytest.mark.process
MB = 10**6


def samples(bytes_per_group: float, *, count: int = 30, jump: int = 0) -> list[Sample]:
    """The producer grows, above 100 MB; `jump`: once, in the first third."""
    return [
        Sample(
            groups=1000 * i, seconds=float(i), used_bytes={"hub": 1, "region": 1},
            resident_bytes={
                name: 100 * MB + (round(bytes_per_group * 1000 * i) + (jump if i > 5 else 0)) * (name == "producer")
                for name in PROCESSES
            },
        )
        for i in range(count)
    ]  # fmt: skip


def run_of(found: list[Sample], **ledger: object) -> Soak:
    told = {"produced": 3, "foreign": 0, "pending": 0, "fates": {"trained": 3}, "balanced": True, "alarms": 0, **ledger}
    return Soak(29_000, 9.0, 4_000, told, tuple(judge(found)), tuple(found))


def test_every_group_of_a_small_soak_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_soak, "CHECKPOINT_EVERY", 1)
    heard: list[str] = []
    done = soak(580, group_size=2, tokens=4, tell=heard.append)
    assert done.ledger == {
        "produced": 600, "foreign": 0, "pending": 0, "fates": {"trained": 600}, "balanced": True, "alarms": 0,
    }  # fmt: skip
    assert done.samples[-1].groups == done.groups == 600
    assert heard[-1] == "600 of 600 groups"
    assert [found.process for found in done.memory] == list(PROCESSES)
    for found in done.samples:
        assert min(found.resident_bytes[name] for name in PROCESSES) > MB
        assert found.used_bytes.keys() == {"hub", "region"}
    assert done.samples[-1].resident_bytes["learner"] > 20 * MB  # Python with Arrow: the right process was measured
    plot(done, tmp_path / "soak.svg")
    assert "<svg" in (tmp_path / "soak.svg").read_text()
    assert as_json(done)["memory"][0].keys() == {*Memory.__slots__, "flat"}


@pytest.mark.parametrize(
    ("bytes_per_group", "jump", "flat"), [(0.0, 0, True), (0.0, 50 * MB, True), (300.0, 0, False), (-300.0, 0, True)]
)
def test_growth_after_the_first_third_is_found(bytes_per_group: float, jump: int, flat: bool) -> None:
    by_name = {found.process: found for found in judge(samples(bytes_per_group, jump=jump))}
    assert by_name["producer"].flat == flat
    assert by_name["producer"].bytes_per_1000_groups == pytest.approx(1000 * bytes_per_group, abs=1)
    assert by_name["learner"].flat


def test_flat_memory_does_not_count_without_an_exact_ledger() -> None:
    assert run_of(samples(0.0)).kept
    assert not run_of(samples(300.0)).kept
    for wrong in ({"balanced": False}, {"pending": 1}, {"alarms": 1}):
        assert not run_of(samples(0.0), **wrong).kept


def test_the_table_shows_every_process() -> None:
    drawn = table(run_of(samples(300.0)))
    assert drawn.row_count == len(PROCESSES)
    assert list(drawn.columns[-1].cells) == ["yes", "yes", "no", "yes"]
    assert "exact" in str(drawn.title)
    assert "does not hold" in str(table(run_of(samples(0.0), alarms=1)).title)


def test_a_process_that_ends_before_its_time_is_named_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with bench_soak._actor("nobody", tmp_path / "config.toml", tmp_path) as actor:
        with pytest.raises(TemporaryError, match=r"the nobody ended with 1: (.|\n)*KeyError: 'nobody'"):
            actor.next_line(actor)
        with pytest.raises(TemporaryError, match="the nobody ended with 1"):
            actor.ends()


def test_a_run_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_soak, "NO_PROGRESS_S", 0.3)
    log = tmp_path / "learner.log"
    log.write_text("waiting for groups")
    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, text=True)
    words = r"next group to be trained \(learner\); waiting for groups"
    with (
        contextlib.closing(bench_soak._Actor("learner", process, log)) as actor,
        pytest.raises(DeadlineError, match=words),
    ):
        actor.next_line(actor)
    assert process.returncode is not None


def test_too_few_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "soak", "--groups", "10"])
    assert ended.value.code == 2
    assert "at least 5000" in capsys.readouterr().err
