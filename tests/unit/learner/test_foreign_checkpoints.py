"""A torn, damaged or foreign checkpoint is refused by name, and no older one is taken in its place without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.learner.checkpoint import give_up_above
from anabranch.learner.checkpoint_folder import MARKER
from anabranch.schemas.errors import CheckpointError, TemporaryError
from tests.checkpoint_stores import Counter, store


def two(root: Path) -> Path:
    """Checkpoints of steps 1 and 2; the newer."""
    store(root).save(Counter(1), {"n": 1})
    return store(root).save(Counter(2), {"n": 2})


@pytest.mark.parametrize(
    ("other", "message"),
    [({"run": "theirs"}, r"belongs to run 'run', not 'theirs'"), ({"layout_hash": "0" * 32}, "holds another model")],
)
def test_one_of_another_run_or_model(tmp_path: Path, other, message):
    two(tmp_path)
    with pytest.raises(CheckpointError, match=rf"step-00000002 {message}"):
        store(tmp_path, **other).load_newest(Counter())


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def foreign_tensors(place: Path) -> None:
    (place / "deep" / "mp_rank_01_model_states.pt").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda place: flip(place / "deep" / "state.pt"), "deep/state.pt is damaged: its 1 bytes have another digest"),
        (lambda place: (place / "deep" / "state.pt").write_bytes(b""), "it has 0 bytes, not 1"),
        (lambda place: (place / "deep" / "state.pt").write_bytes(b"22"), "it has 2 bytes, not 1"),
        (lambda place: (place / "deep" / "state.pt").unlink(), "deep/state.pt is missing"),
        (lambda place: flip(place / "client.json"), "client.json is damaged"),
        (lambda place: (place / "client.json").unlink(), "client.json is missing"),
        (lambda place: shutil.rmtree(place / "deep"), "deep/state.pt is missing"),
        (foreign_tensors, "mp_rank_01_model_states.pt is no file of this checkpoint"),
    ],
)
def test_a_file_that_is_damaged_missing_or_foreign(tmp_path: Path, damage: Callable[[Path], object], named: str):
    place = two(tmp_path)
    damage(place)
    engine = Counter()
    with pytest.raises(CheckpointError, match=rf"{named}.*anabranch checkpoints --give-up-above 1$"):
        store(tmp_path).load_newest(engine)
    assert engine.step == 0, "nothing of it was loaded"
    give_up_above(place.parent, 1)  # as it says
    assert store(tmp_path).load_newest(engine) == {"n": 1}
    assert engine.step == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "anabranch.checkpoint/2"}, "has the format 'anabranch.checkpoint/2' and this version reads"),
        ({"format": "somebody.else"}, "has the format 'somebody.else'"),
        ({"step": "many"}, "COMPLETE.json is damaged: it is not a checkpoint marker"),
        ({"extra": 1}, "COMPLETE.json is damaged"),
        ({"step": 40}, "step-00000002 holds step 40: it was renamed"),
    ],
)
def test_a_marker_of_another_format_or_place(tmp_path: Path, change: dict[str, object], message: str):
    place = two(tmp_path)
    marker = json.loads((place / MARKER).read_text())
    (place / MARKER).write_text(json.dumps(marker | change))
    with pytest.raises(CheckpointError, match=message):
        store(tmp_path).load_newest(Counter())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 7}'])
def test_a_marker_that_is_torn(tmp_path: Path, content: bytes):
    """`write_atomically` leaves none; a disk that forgot may. Removing it goes back to the one before, as it says."""
    place = two(tmp_path)
    (place / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match="not a checkpoint marker this version reads"):
        store(tmp_path).load_newest(Counter())
    (place / MARKER).unlink()
    assert store(tmp_path).load_newest(Counter()) == {"n": 1}


def test_one_without_a_marker_is_not_seen(tmp_path: Path):
    place = two(tmp_path)
    (place / MARKER).unlink()
    assert store(tmp_path).load_newest(Counter()) == {"n": 1}


def test_one_that_was_copied_under_the_name_of_a_later_step(tmp_path: Path):
    place = two(tmp_path)
    shutil.copytree(place, place.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match="step-00000009 holds step 2: it was renamed"):
        store(tmp_path).load_newest(Counter())


@pytest.mark.parametrize(
    "put", [lambda p: p.symlink_to("elsewhere"), lambda p: p.write_bytes(b"")], ids=["link", "file"]
)
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path, put: Callable[[Path], object]):
    put(tmp_path / "check points")
    with pytest.raises(TemporaryError, match=r"cannot be listed .*check points"):
        store(tmp_path).load_newest(Counter())
