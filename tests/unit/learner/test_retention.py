from pathlib import Path

from anabranch.learner.checkpoint_folder import step_of
from anabranch.learner.retention import kept_checkpoints


def kept(*steps: str, keep: int = 2, keep_every: int = 0) -> dict[str, str]:
    found = kept_checkpoints([Path(f"step-{s:0>8}") for s in steps], keep=keep, keep_every=keep_every)
    return {p.name: why for p, why in found.items()}


def test_the_newest_stay():
    assert kept("10", "20", "30") == {"step-00000020": "one of the newest", "step-00000030": "the newest"}
    assert list(kept("10", keep=1)) == ["step-00000010"]
    assert kept() == {}


def test_those_of_every_so_many_steps_stay_for_good():
    assert kept("0", "10", "20", "30", "40", keep=1, keep_every=20) == {
        "step-00000020": "of every 20 steps",
        "step-00000040": "the newest; of every 20 steps",
    }


def test_of_a_step_that_was_done_twice_the_later_checkpoint_is_kept_for_good():
    places = [Path(n) for n in ("step-00000020", "step-00000020.1", "step-00000030")]
    assert [p.name for p in kept_checkpoints(places, keep=1, keep_every=20)] == ["step-00000020.1", "step-00000030"]
    assert [step_of(p) for p in places] == [20, 20, 30]
