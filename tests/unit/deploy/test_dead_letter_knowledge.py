from __future__ import annotations

from anabranch.deploy.dead_letter_knowledge import gather, of_board, trained_indices
from anabranch.deploy.dead_letter_moves import Knowledge
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.fates import LOGGED, FateRecord
from anabranch.schemas.metrics import LearnerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_boards import MemoryRunBoard


def fate(index: int, name: str) -> bytes:
    return FateRecord(
        region="east", producer="p", seq=index, group_index=index, attempt=0, fate=name, epoch=1, version=0, age=0, rollouts=2,
        tokens=4, cut=0, reward=0.5, time_ms=1,
    ).line()  # fmt: skip


def test_a_board_says_where_the_learner_is_and_whether_the_run_is_over():
    board, nothing = MemoryRunBoard(), Knowledge("r", 1, 2)
    assert of_board(nothing, board) == nothing
    board.report_learner(LearnerStatus(updated_ms=1, state="stepping", step=8, steps_total=9, epoch=2, version=8))
    board.finish("all steps done")
    known = of_board(nothing, board)
    assert (known.version, known.finished) == (PolicyVersion(2, 8), "all steps done")


def test_what_a_step_consumed_counts_as_trained(tmp_path):
    assert trained_indices(tmp_path) is None
    (tmp_path / "fates").mkdir()
    assert trained_indices(tmp_path) == set()
    lines = [fate(index, name) for index, name in enumerate(LOGGED)]
    (tmp_path / "fates" / "000001.jsonl").write_bytes(b"".join(lines))
    assert {LOGGED[index] for index in trained_indices(tmp_path) or ()} == {
        "trained",
        "dropped:zero_variance",
        "dropped:gate",
    }


def test_a_hub_that_is_away_is_told_and_no_more(tmp_path, monkeypatch):
    def away(config):
        raise StreamUnavailableError("no answer")

    monkeypatch.setattr("anabranch.deploy.dead_letter_knowledge.connect_hub", away)
    config = load_config(f'[run]\nname = "r"\ndir = "{tmp_path}"\n[correction]\nmax_age = 3\n')
    told: list[str] = []
    known = gather(config, told.append)
    assert (known.run, known.max_age, known.version, known.trained) == ("r", 3, None, None)
    assert told == ["what the learner does is not known: no answer"]
