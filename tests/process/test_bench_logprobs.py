"""`anabranch bench logprobs` measures what it says: both ways compute the same, and memory is what a pass takes."""

from __future__ import annotations

import json

import pytest

from anabranch.cli.main import main
from anabranch.deploy import bench_logprobs, logprobs_pass
from anabranch.deploy.bench_logprobs import Row, measure_logprobs, table
from anabranch.deploy.logprobs_pass import Pass, measure
from anabranch.schemas.errors import DeadlineError, TemporaryError

pytestmark = pytest.mark.process


@pytest.mark.timeout(180)
def test_every_figure_of_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "600", "--vocabulary", "20000", "--hidden", "16", "--rounds", "1", "--entropy", "--json"]
    assert main(["bench", "logprobs", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"machine", *Row.__slots__, "memory_aim", "time_aim", "kept"}
    assert (told["tokens"], told["vocabulary"], told["hidden"], told["entropy"]) == (600, 20000, 16, True)
    for way in ("reference", "ours"):
        assert all(told[way][name] > 0 for name in ("extra_gib", "forward_s", "backward_s", "cpu_s"))
    logits_gib = 600 * 20_000 * 4 / 2**30
    assert told["reference"]["extra_gib"] > 2.9 * logits_gib  # log-softmax, its gradient, the logits' gradient
    # A third kept, two tiles for the entropy: anything that held all logits would show.
    assert told["ours"]["extra_gib"] < 0.5 * logits_gib + 2.5 * 2**24 / 2**30
    assert told["memory_ratio"] == pytest.approx(told["ours"]["extra_gib"] / told["reference"]["extra_gib"], rel=1e-2)
    assert 0 < told["difference"] < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entropy", [True, False])
def test_both_ways_compute_the_same(dtype: str, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_pass, "_begin_peak", lambda: 0)  # of the tests' own process: left alone
    ours, theirs = (measure(Pass(way, 70, 300, 8, dtype, 1, entropy)).samples for way in ("ours", "reference"))
    assert [len(s) for s in ours] == [64, 64, 64]
    assert bench_logprobs._apart(ours, theirs) < (1e-5 if dtype == "float32" else 1e-2)
    theirs[2][5] += 1.0
    assert bench_logprobs._apart(ours, theirs) > 1e-2


def test_a_pass_that_dies_is_told_by_name() -> None:
    with pytest.raises(TemporaryError, match=r"a pass of the reference way ended with 1 .*no_such_dtype"):
        measure_logprobs(tokens=2, vocabulary=3, hidden=4, dtype="no_such_dtype", rounds=1)


def test_a_pass_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_logprobs, "PASS_DEADLINE_S", 0.01)
    with pytest.raises(DeadlineError, match="waiting for a pass of the reference way"):
        measure_logprobs(tokens=2, vocabulary=3, hidden=4, rounds=1)


@pytest.mark.parametrize(("memory", "time", "kept"), [(0.12, 0.99, True), (0.13, 0.9, False), (0.12, 1.01, False)])
def test_both_aims_have_to_be_met(memory: float, time: float, kept: bool) -> None:
    figures = {"extra_gib": 1.0, "forward_s": 1.0, "backward_s": 1.0, "cpu_s": 2.0}
    row = Row(1, 2, 3, "float32", 1, False, 3, figures, figures, memory, time, 0.9, 0.0)
    assert row.kept == kept
    assert table(row).row_count == 3
