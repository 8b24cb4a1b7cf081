from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.learner.checkpoint import CheckpointStore, give_up_above
from anabranch.learner.checkpoint_folder import MARKER
from anabranch.learner.weights import tensor_bits
from anabranch.schemas.errors import CheckpointError, TemporaryError
from tests.checkpoint_stores import Counter, store
from tests.limits import file_size_limit
from tests.unit.learner.conftest import make_batch


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in (directory / "check points").iterdir())


def test_those_of_every_so_many_steps_are_kept_for_good(tmp_path: Path):
    for step in (0, 2, 4, 5, 6):
        store(tmp_path, keep=1, keep_every=4).save(Counter(step), {})
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_what_was_made_of_a_checkpoint_for_other_ranks_goes_with_it(tmp_path: Path):
    for step in (1, 2):
        place = store(tmp_path, keep=1).save(Counter(step), {})
        place.with_name(f"universal-{place.name}").mkdir()
        assert f"universal-{place.name}" in names(tmp_path)
    assert "universal-step-00000001" not in names(tmp_path)


def test_old_ones_that_cannot_be_removed_do_not_make_a_new_one_fail(tmp_path: Path, monkeypatch):
    store(tmp_path, keep=1).save(Counter(1), {})

    def refused(path: Path) -> None:
        raise PermissionError(13, "not yours", str(path))

    monkeypatch.setattr("anabranch.learner.checkpoint.shutil.rmtree", refused)
    store(tmp_path, keep=1).save(Counter(2), {"n": 2})
    assert store(tmp_path).load_newest(Counter()) == {"n": 2}


def test_the_newest_complete_one_is_loaded_and_older_ones_retire(tmp_path: Path):
    for step in (1, 2, 3):
        store(tmp_path).save(Counter(step), {"seen": [step]})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    engine = Counter()
    assert store(tmp_path).load_newest(engine) == {"seen": [3]}
    assert engine.step == 3


def test_it_says_that_it_lives_at_every_block_of_a_file(tmp_path: Path):
    """A supervisor takes a learner that is silent for minutes for a hung one."""

    class Large(Counter):
        def save(self, directory: Path, client_state: dict[str, Any]) -> None:
            super().save(directory, client_state)
            (directory / "large").write_bytes(bytes(3 * 2**22))

    beats: list[int] = []
    CheckpointStore(
        tmp_path, run="run", layout_hash=Counter.layout.hash, keep=1, heartbeat=lambda: beats.append(1)
    ).save(Large(), {})
    assert len(beats) >= 3 + 2, "three blocks, and two small files"


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path):
    assert store(tmp_path).load_newest(Counter()) is None


def test_one_without_a_marker_is_not_seen_and_is_cleared_away_later(tmp_path: Path):
    """A crash between the rename and the marker, and one before the rename."""
    store(tmp_path).save(Counter(1), {})
    place = store(tmp_path).save(Counter(2), {})
    (place / MARKER).unlink()
    aside = place.with_name(".step-00000003.tmp")
    aside.mkdir()
    engine = Counter()
    store(tmp_path).load_newest(engine)
    assert engine.step == 1
    store(tmp_path).save(Counter(2), {"again": True})
    assert not aside.exists()
    assert store(tmp_path, keep=1).load_newest(Counter()) == {"again": True}


def test_a_crash_while_saving_leaves_the_earlier_one(tmp_path: Path):
    store(tmp_path).save(Counter(1), {"n": 1})

    class Crashing(Counter):
        def save(self, directory: Path, client_state: dict[str, Any]) -> None:
            super().save(directory, client_state)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store(tmp_path).save(Crashing(2), {"n": 2})
    assert store(tmp_path).load_newest(Counter()) == {"n": 1}


def test_a_second_one_of_the_same_step_is_the_newer(tmp_path: Path):
    for k in range(3):
        store(tmp_path).save(Counter(7), {"k": k})
    assert store(tmp_path).load_newest(Counter()) == {"k": 2}
    assert names(tmp_path) == ["step-00000007.1", "step-00000007.2"]


def digest(bits: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: b.tobytes() for name, b in bits.items()}


@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 1}, {"zero_stage": 1, "compute_dtype": "bfloat16"}, {"zero_stage": 3}, {"zero_stage": 0}],
    ids=str,
)
def test_a_resumed_learner_continues_bit_for_bit(engine, tmp_path: Path, settings):
    batches = [make_batch([2 * k, 2 * k + 1]) for k in range(4)]
    straight = engine(**settings)
    for batch in batches:
        straight.train_step(batch)

    first = engine(**settings)
    checkpoints = store(tmp_path, layout_hash=first.layout.hash)
    for batch in batches[:2]:
        first.train_step(batch)
    checkpoints.save(first, {"feed": {"trained_below": 4}, "epoch": 1})
    second = engine(**settings)
    assert checkpoints.load_newest(second) == {"feed": {"trained_below": 4}, "epoch": 1}
    assert second.step == 2
    assert digest(second.state_bits()) == digest(first.state_bits())
    for batch in batches[2:]:
        second.train_step(batch)
    assert second.step == 4
    assert digest(second.state_bits()) == digest(straight.state_bits())


def test_saving_does_not_disturb_the_run(engine, tmp_path: Path):
    saved, plain = engine(), engine()
    for k in range(3):
        batch = make_batch([2 * k, 2 * k + 1])
        saved.train_step(batch)
        plain.train_step(batch)
        store(tmp_path, layout_hash=saved.layout.hash).save(saved, {})
    assert digest(saved.state_bits()) == digest(plain.state_bits())


@pytest.mark.parametrize(
    ("other", "message"),
    [({"zero_stage": 0}, "zero_stage = 1"), ({"compute_dtype": "bfloat16"}, "compute_dtype = float32")],
)
def test_another_stage_or_dtype_is_refused_by_name(engine, tmp_path: Path, other, message):
    engine().save(tmp_path / "c", {})
    with pytest.raises(CheckpointError, match=f"written with {message}; this learner has"):
        engine(**other).load(tmp_path / "c")


class Payload:
    """What a hostile checkpoint file would hold: unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("stage", [0, 1])
def test_loading_runs_no_code_from_the_files(engine, tmp_path: Path, stage):
    engine(zero_stage=stage).save(tmp_path / "c", {})
    for file in (tmp_path / "c" / "deepspeed").glob("*.pt"):
        torch.save({"module": Payload(tmp_path / "ran")}, file)
    with pytest.raises(CheckpointError, match="is not a DeepSpeed checkpoint file"):
        engine(zero_stage=stage).load(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_export_writes_a_folder_that_loads_and_replaces_the_one_before(engine, tmp_path: Path):
    from anabranch.learner.policy import load_model

    made = engine()
    checkpoints = store(tmp_path, layout_hash=made.layout.hash)
    checkpoints.export(made)
    made.train_step(make_batch())
    folder = checkpoints.export(made)
    assert folder == tmp_path / "model"
    lm = load_model(folder, torch.bfloat16)
    weights = lm.state_dict()
    for name, bits in made.state_bits().items():
        assert np.array_equal(tensor_bits(weights[name].contiguous()), bits)


def test_export_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path, model_dir: Path):
    """A model folder that was moved to a larger disk; the last thing of a run must not fail for it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "model").symlink_to(elsewhere)
    store(tmp_path).export(Counter(1, model_dir))
    assert (tmp_path / "model" / "config.json").exists()
    assert list(elsewhere.iterdir()) == []


def test_later_checkpoints_can_be_given_up_and_an_older_one_is_resumed(tmp_path: Path):
    directory = tmp_path / "check points"
    for step in (10, 20, 30):
        store(tmp_path, keep=3).save(Counter(step), {"at": step})
    moved = give_up_above(directory, 15)
    assert [(a.name, b.name) for a, b in moved] == [
        ("step-00000030", "given-up-step-00000030.0"),
        ("step-00000020", "given-up-step-00000020.0"),
    ]
    engine = Counter()
    assert store(tmp_path).load_newest(engine) == {"at": 10}
    store(tmp_path, keep=1).save(Counter(20), {"at": "again"})
    assert names(tmp_path) == ["given-up-step-00000020.0", "given-up-step-00000030.0", "step-00000020"]
    assert give_up_above(directory, 20) == []


def test_not_all_checkpoints_can_be_given_up(tmp_path: Path):
    store(tmp_path).save(Counter(10), {})
    with pytest.raises(CheckpointError, match="no complete checkpoint at or below step 9"):
        give_up_above(tmp_path / "check points", 9)
    assert names(tmp_path) == ["step-00000010"]


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(engine, tmp_path: Path):
    """torch's archive writer makes a RuntimeError of it, which ended the learner as a bug (exit 70)."""
    learner = engine()
    checkpoints = store(tmp_path, layout_hash=learner.layout.hash)
    learner.train_step(make_batch([0, 1]))
    checkpoints.save(learner, {"at": 1})
    learner.train_step(make_batch([2, 3]))
    with pytest.raises(TemporaryError, match=r"\.pt cannot be written .* bytes are free"), file_size_limit(20_000):
        checkpoints.save(learner, {"at": 2})
    assert names(tmp_path) == ["step-00000001"], "what is full has its room again: the next start needs some"
    again = engine()
    assert checkpoints.load_newest(again) == {"at": 1}
    checkpoints.save(learner, {"at": 2})
    assert checkpoints.load_newest(again) == {"at": 2}
