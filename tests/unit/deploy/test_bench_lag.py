"""A study runs every missing cell once, whatever becomes of its processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anabranch.deploy import bench_lag
from anabranch.deploy.bench_lag import run_study
from anabranch.deploy.lag_measures import Measuring
from anabranch.deploy.lag_study import Results, Study, make_study, open_results
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, ConfigError, DeadlineError, TemporaryError, UsageError
from tests.lag_rows import make_row


class FakeWorker:
    """Answers at once; `script` says what about the n-th cell of all, else a result."""

    made: ClassVar[list[FakeWorker]] = []
    script: ClassVar[dict[int, list[dict[str, Any]]]] = {}
    ran: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, inbox: Any) -> None:
        self._inbox, self.done, self.idle, self.closed = inbox, 0, True, False
        self.made.append(self)

    def run(self, config: RunConfig, lag: int, measuring: Measuring) -> None:
        self.done, self.idle = self.done + 1, False
        self.ran.append((config.correction.objective, lag))
        names = ("correction", "lag", "lr", "seed", "steps", "settings")
        result = {key: value for key, value in make_row("none", lag).items() if key not in names}
        for message in self.script.get(len(self.ran), [{"tell": "step 5"}, {"result": result}]):
            self._inbox.put((self, message))

    def close(self) -> None:
        if not self.closed:
            self._inbox.put((self, {}))
        self.closed = True

    def death(self) -> TemporaryError:
        return TemporaryError("a process of the study ended with -9")


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.made, FakeWorker.script, FakeWorker.ran = [], {}, []
    monkeypatch.setattr(bench_lag, "Worker", FakeWorker)
    return FakeWorker


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return make_study(
        preset="tiny", overrides=(), model=tmp_path, corrections=["none", "ppo"], lags=[0, 4, 8], lrs=[3e-4], seeds=1, steps=20,
        measuring=Measuring(),
    )  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    with open_results(tmp_path / "lag.jsonl", resume=False) as results:
        yield results


ALL = [("none", 0), ("none", 4), ("none", 8), ("ppo", 0), ("ppo", 4), ("ppo", 8)]


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_every_cell_runs_once(
    study: Study, results: Results, workers: type[FakeWorker], tmp_path: Path, jobs: int
) -> None:
    told: list[str] = []
    run_study(study, results, jobs=jobs, tell=told.append)
    assert workers.ran == ALL
    rows = [json.loads(line) for line in (tmp_path / "lag.jsonl").read_text().splitlines()]
    assert [(row["correction"], row["lag"]) for row in rows] == ALL
    assert len(workers.made) == min(jobs, 6)
    assert all(worker.closed for worker in workers.made)
    assert told[-1].startswith("6 of 6, 0 min left; ppo, lag 8, lr 0.0003, seed 0: held-out reward 0.900")


def test_a_study_that_died_goes_on_where_it_was(study: Study, results: Results, workers: type[FakeWorker]) -> None:
    workers.script = {4: [{}]}
    with pytest.raises(TemporaryError, match="ended with -9"):
        run_study(study, results, jobs=1)
    assert all(worker.closed for worker in workers.made)
    FakeWorker.ran, FakeWorker.script = [], {}
    run_study(study, results, jobs=1)
    assert FakeWorker.ran == ALL[3:], "the cell that was running is run again, those before it are not"
    run_study(study, results, jobs=1)
    assert FakeWorker.ran == ALL[3:]


def test_workers_are_replaced(
    study: Study, results: Results, workers: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_lag, "CELLS_OF_A_WORKER", 2)
    run_study(study, results, jobs=1)
    assert workers.ran == ALL
    assert [worker.done for worker in workers.made] == [2, 2, 2]


@pytest.mark.parametrize(("code", "kind"), [(78, ConfigError), (70, AnabranchError)])
def test_an_error_of_a_cell_names_it(
    study: Study, results: Results, workers: type[FakeWorker], code: int, kind: type[Exception]
) -> None:
    workers.script = {2: [{"error": "no such model", "exit_code": code}]}
    with pytest.raises(kind, match=r"none, lag 4, lr 0\.0003, seed 0: no such model"):
        run_study(study, results, jobs=1)
    assert len(results.rows) == 1


def test_silence_has_an_end(
    study: Study, results: Results, workers: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_lag, "NO_PROGRESS_S", 0.01)
    workers.script = {1: []}
    with pytest.raises(DeadlineError, match="none, lag 0"):
        run_study(study, results, jobs=1)


def test_no_jobs_are_refused(study: Study, results: Results) -> None:
    with pytest.raises(UsageError, match="--jobs 0"):
        run_study(study, results, jobs=0)
