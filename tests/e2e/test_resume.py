"""`anabranch bench resume` on a model for tests: a learner that resumes trains the bits of one that never stopped."""

from __future__ import annotations

import json

import pytest

from anabranch.cli.main import main
from anabranch.learner import bench_resume
from anabranch.learner.bench_resume import Comparison, as_json
from anabranch.schemas.config import RunConfig, load_config
from tests.unit.learner.conftest import save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SETTINGS = (
    "learner.groups_per_step=2", "learner.lr=1e-3", "learner.warmup_steps=4", "learner.lr_schedule=cosine", "learner.steps=6",
    "learner.micro_batch_tokens=64", "sampling.group_size=4", "sampling.max_tokens=6", "task.max_prompt_tokens=5",
    "correction.veto_low=0", "correction.veto_high=1e9",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    model = save_qwen3(tmp_path_factory.mktemp("model") / "tied")
    return load_config("", overrides=[f"model.path={json.dumps(str(model))}", *SETTINGS])


@pytest.mark.parametrize(("ranks", "stages"), [(1, [0, 1, 2, 3]), (2, [2, 3])])
def test_losses_and_weights_are_those_of_a_run_that_never_stopped(config: RunConfig, ranks: int, stages: list[int]):
    found = list(
        bench_resume.bench_resume(config, stages=stages, ranks=[ranks], steps=5, resumes=3, seed=0, tell=lambda _: None)
    )
    assert [(row.stage, row.ranks) for row in found] == [(stage, ranks) for stage in stages]
    for row in found:
        assert row.equal, row
        assert row.changes == row.steps == 5
        after = sum(5 - at for at in row.resumed_at)
        assert (row.losses, row.weights) == (after, after + 3)


def test_a_difference_is_told_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config
):
    row = Comparison(1, 1, "bfloat16", "float32", 5, 5, (1, 2), 7, 7, 9, 9)
    different = Comparison(1, 1, "bfloat16", "float32", 5, 5, (1, 2), 7, 6, 9, 9)
    nothing = Comparison(1, 1, "bfloat16", "float32", 5, 0, (1, 2), 7, 7, 9, 9)
    assert [as_json(r)["equal"] for r in (row, different, nothing)] == [True, False, False]
    monkeypatch.setattr("anabranch.deploy.bench_loop.preset_config", lambda _: config)
    for rows, code in (([row], 0), ([row, different], 1)):
        monkeypatch.setattr(bench_resume, "bench_resume", lambda *_, rows=rows, **__: iter(rows))
        assert main(["bench", "resume", "--json"]) == code
        assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(as_json(r))) for r in rows]
    assert main(["bench", "resume"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
