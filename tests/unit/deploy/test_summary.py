"""The summary says what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.consumers.fate_log import FateLog
from anabranch.deploy.summary import machine_facts, write_report
from anabranch.schemas.errors import UsageError
from tests.fates import record


def test_figures_of_a_whole_run(run_dir: Path) -> None:
    (run_dir / "run.json").write_text(
        json.dumps({"preset": "tiny", "completed": True, "wall_s": 93.5, "restarts": {"hub": 0, "east-0": 2}})
    )
    (run_dir / "ledger.json").write_text(
        json.dumps({"east": {"produced": 700, "pending": 10, "fates": {"trained": 680, "dropped:age": 10}},
                    "west": {"produced": 700, "pending": 0, "fates": {"trained": 699}}})
    )  # fmt: skip
    pauses = (9000.0, 10.0, 14.0, 12.0)
    swaps = [{"swap": n, "pause_ms": p, "publish_to_serve_ms": 400 + p} for n, p in enumerate(pauses, start=1)]
    (run_dir / "swaps.jsonl").write_text("".join(json.dumps(s) + "\n" for s in swaps) + '{"pause_ms": 9')
    paths = write_report(run_dir, plots=False)
    summary = json.loads(paths[0].read_text())
    assert summary["heldout_before"]["mean_reward"] == 0.412
    assert summary["heldout_after"]["mean_reward"] == 0.835
    assert (summary["steps"], summary["steps_total"], summary["tokens_trained"]) == (40, 40, 60_000)
    assert summary["training_s"] == pytest.approx(19.5)
    assert summary["s_per_step"] == pytest.approx(0.5)
    assert summary["wait_share"] == pytest.approx(0.1 / 0.45)
    assert summary["tokens_per_s"] == {"east": 1203.0, "west": 987.5}
    assert summary["swap_pause_ms_median"] == 12.0
    assert summary["publish_to_serve_ms_median"] == 412.0
    assert summary["age_mean"] == pytest.approx((700 + 400 + 500) / 1500)
    assert summary["age_max"] == 5
    page = paths[1].read_text()
    assert "held-out reward 0.412 ± 0.030 -> 0.835 ± 0.030 (200 prompts)" in page
    assert "| east | 700 | dropped:age 10, trained 680 | 10 | yes |" in page
    assert "| west | 700 | trained 699 | 0 | **no** |" in page
    assert "east-0 2" in page


def test_foreign_entries_and_biased_drops_are_told(run_dir: Path) -> None:
    east = {
        "produced": 60,
        "foreign": 1,
        "pending": 0,
        "fates": {"trained": 40, "dropped:age": 20, "dropped:duplicate": 1},
    }
    (run_dir / "ledger.json").write_text(json.dumps({"east": east}))
    log = FateLog(run_dir / "fates", file_lines=100)
    log.append(record(seq=s, tokens=100 + s) for s in range(40))
    log.append(record(seq=s, tokens=500 + s, fate="dropped:age") for s in range(40, 60))
    log.close()
    page = write_report(run_dir, plots=False)[1].read_text()
    assert "| east | 60 + 1 foreign |" in page
    assert "| 0 | yes |" in page
    assert "- dropped:age: slow groups are dropped more than fast ones" in page


def test_metrics_alone_are_enough_and_nothing_is_guessed(run_dir: Path) -> None:
    paths = write_report(run_dir)
    assert all(path.stat().st_size > 0 for path in paths)
    assert len(paths) == 8
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [summary[key] for key in ("ledger", "wall_s", "swap_pause_ms_median", "machine")] == [None] * 4


def test_a_run_that_stopped_before_its_first_step(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("")
    write_report(run_dir, plots=False)
    assert "held-out reward: not evaluated" in (run_dir / "summary.md").read_text()


def test_reporting_twice_gives_the_same(run_dir: Path) -> None:
    first = [path.read_bytes() for path in write_report(run_dir, plots=False)]
    assert [path.read_bytes() for path in write_report(run_dir, plots=False)] == first


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path)


def test_the_machine_is_described_without_its_name() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert facts["memory_gb"] > 0.1
    assert "node" not in json.dumps(facts)
    assert facts["packages"]["torch"]
