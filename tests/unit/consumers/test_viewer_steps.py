"""Pages of steps and of weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.viewer.steps import histogram, step_list, step_page
from anabranch.consumers.viewer.weights import weights_page
from anabranch.schemas.errors import UsageError
from tests.replay_runs import write_run


def test_a_step_with_a_record_shows_what_it_computed(tmp_path: Path):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        found = step_page(reader, 1, 1)
        assert found.logged is None, "this run's metrics have no line of it"
        assert found.facts is not None
        assert found.facts["updates"][0]["applied"] is True
        assert [row["row"] for row in found.rollouts] == [0, 1, 2, 3]
        assert step_list(reader, number=1) == ([], 0)


def test_a_step_that_nothing_tells_of_is_refused(tmp_path: Path):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader, pytest.raises(UsageError, match="step 7 of epoch 1"):
        step_page(reader, 1, 7)


def test_weights_are_those_of_versions_jsonl(tmp_path: Path):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        found = weights_page(reader)
    assert [(v["epoch"], v["version"]) for v in found.versions] == [(2, 1), (1, 1), (1, 0)]
    assert [(t["kind"], t["n"]) for t in found.totals] == [("anchor", 3)]
    assert found.served == {}


def test_a_histogram_counts_every_finite_value_once():
    counts = histogram([0.0, 0.5, 1.0, 1.0, math.nan, math.inf], bins=4)
    assert [count for _, count in counts] == [1, 0, 1, 2]
    assert counts[0][0] == "0.000 to 0.250"
    assert histogram([2.0, 2.0]) == [("2", 2)]
    assert histogram([]) == []
