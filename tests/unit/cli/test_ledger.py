"""The command over streams in memory and a fate log on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from anabranch.cli import ledger_commands
from anabranch.cli.main import main
from anabranch.consumers.fate_log import FateLog
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import LearnerStatus
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from tests.fates import record
from tests.groups import entry
from tests.streams import put

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stores(monkeypatch) -> dict[str, MemoryStreamStore]:
    """East: 2 groups, one of them trained. West: 1 pending."""
    stores = {"east": MemoryStreamStore(), "west": MemoryStreamStore()}
    put(MemoryStream(stores["east"]), entry(0), entry(1))
    put(MemoryStream(stores["west"]), entry(2))
    (first,) = MemoryStream(stores["east"]).read(LEARNER_GROUP, "c", max_entries=1, block_ms=0)
    MemoryStream(stores["east"]).settle(LEARNER_GROUP, [(first.entry_id, "trained")])

    def connect(config, region):
        if region not in stores:
            raise StreamUnavailableError(f"no answer from the Redis of region {region}")
        return MemoryStream(stores[region])

    def no_hub(config):
        raise StreamUnavailableError("no hub")

    monkeypatch.setattr("anabranch.transport.wiring.connect_region", connect)
    monkeypatch.setattr("anabranch.transport.wiring.connect_hub", no_hub)
    return stores


@pytest.fixture
def run(tmp_path: Path, stores, capsys) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "r"\ndir = "{tmp_path}"\n[regions.east]\nurl = "redis://h:1"\n[regions.west]\nurl = "redis://h:2"\n'
    )

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(["ledger", *argv, "--config", str(file)])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def log(tmp_path: Path) -> None:
    fates = FateLog(tmp_path / "r" / "fates", file_lines=100)
    fates.append([record(seq=0)])
    fates.close()


def test_all_holds(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "1  = trained" in out
    code, out, _ = run("--json")
    assert (code, json.loads(out)["west"]["pending"]) == (0, 1)


def test_something_does_not_balance(run: Run, stores) -> None:
    stores["west"].books.produced += 1
    code, out, _ = run()
    assert code == 1
    assert "DOES NOT BALANCE: 1 missing" in out


def test_a_region_that_is_away_does_not_hide_the_others(run: Run, stores) -> None:
    del stores["west"]
    code, out, err = run()
    assert code == 75
    assert "1  = trained" in out
    assert "west" in out
    assert err == "anabranch ledger: no answer from the Redis of region west\n"
    stores["east"].books.produced += 1
    assert run()[0] == 1, "what does not balance weighs more"


def test_what_the_learner_has_found_against_its_fate_log_is_told(run: Run, monkeypatch) -> None:
    """Each region's ledger may hold, and yet lack what was trained."""
    status = LearnerStatus(
        updated_ms=1, state="stepping", step=1, steps_total=2, epoch=1, version=1, alarms=("east lacks fates",)
    )
    hub = SimpleNamespace(runs=SimpleNamespace(learner=lambda: status), close=lambda: None)
    monkeypatch.setattr("anabranch.transport.wiring.connect_hub", lambda config: hub)
    code, out, _ = run()
    assert (code, "learner: east lacks fates" in out) == (1, True)
    code, out, err = run("--json")
    assert json.loads(out)["east"]["balanced"] is True
    assert (code, err) == (1, "anabranch ledger: learner: east lacks fates\n")


def test_drops_are_read_from_the_run_directory_alone(run: Run, stores, tmp_path: Path) -> None:
    code, _, err = run("--drops")
    assert code == 2
    assert "there is no fate log in" in err
    log(tmp_path)
    stores.clear()
    code, out, err = run("--drops", "--plot", str(tmp_path / "drops.svg"))
    assert (code, err) == (0, "")
    assert "Too few to compare" in out
    assert (tmp_path / "drops.svg").stat().st_size > 1000
    code, out, _ = run("--drops", "--json")
    assert json.loads(out)["all"]["trained"]["groups"] == 1


@pytest.mark.parametrize(
    "argv",
    [
        ("--plot", "x.svg"),
        ("--drops", "--audit"),
        ("--watch", "0"),
        ("--watch", "-1"),
        ("--watch", "inf"),
        ("--watch", "nan"),
        ("--drops", "--plot", "x.txt"),
    ],
)
def test_a_wrong_command_line(run: Run, tmp_path: Path, argv: tuple[str, ...]) -> None:
    log(tmp_path)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "--" in err


def test_watching_shows_it_again_until_it_is_interrupted(run: Run, monkeypatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ledger_commands.time, "sleep", sleep)
    code, out, _ = run("--watch", "0.5", "--json")
    assert (code, pauses) == (130, [0.5] * 3)
    assert [json.loads(line)["west"]["produced"] for line in out.splitlines()] == [1, 1, 1]
