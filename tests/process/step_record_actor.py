"""Records steps for ever, for test_step_record_kills.py: `python step_record_actor.py FOLDER EPOCH`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' own helpers: python -I leaves the folder out


def main(folder: str, epoch: str) -> None:
    from anabranch.learner.step import UpdateFacts
    from anabranch.learner.step_observer import SeenUpdate
    from anabranch.learner.step_recorder import RecordedStep, StepRecorder
    from anabranch.schemas.config import load_config
    from anabranch.schemas.step_record import UpdateResult
    from tests.record_orders import order_of
    from tests.unit.learner.conftest import make_batch

    recorder = StepRecorder(load_config("", overrides=["run.name=r", f"run.dir={folder}"]))
    batch = make_batch(range(2), reward=lambda s: 1.0)
    print("recording", flush=True)
    version = 0
    while True:
        order = order_of(batch, epoch=int(epoch), version=version)
        seen = [SeenUpdate([], UpdateResult.of(0.1, 1.0, applied=True), ())]
        recorder.put(RecordedStep(order, [UpdateFacts((0, 1), (0, 1), 1.0)], seen, 1e-4, 1, 0.1))
        version += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
