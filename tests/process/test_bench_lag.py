"""The lag study's real processes: a cell there is a cell here, errors come back by name, a death is heard of."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path
from typing import Any

import pytest

from anabranch.deploy.lag_measures import Measuring
from anabranch.deploy.lag_worker import Inbox, Worker
from tests.lag_models import make_config, make_model

WAIT_S = 120.0
MEASURING = Measuring(every=1, samples=1, final_samples=1)


def answer(inbox: Inbox) -> dict[str, Any]:
    while "tell" in (message := inbox.get(timeout=WAIT_S)[1]):
        pass
    return message


def test_cells_errors_and_deaths_come_back(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"), "learner.groups_per_step=1", "sampling.group_size=2")
    inbox: Inbox = queue.Queue()
    worker = Worker(inbox)
    try:
        worker.run(config, 1, MEASURING)
        result = answer(inbox)["result"]
        assert [version for version, _ in result["heldout"]] == [0, 1, 2]
        assert len(result["reward"]) == 2

        nowhere = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "none"})})
        worker.run(nowhere, 1, MEASURING)
        refused = answer(inbox)
        assert refused["exit_code"] == 78
        assert "not a Hugging Face checkpoint folder" in refused["error"]

        os.kill(worker._process.pid, signal.SIGKILL)
        assert answer(inbox) == {}
        assert "ended with -9" in str(worker.death())
        worker.run(config, 1, MEASURING)  # nobody is there: the end has been told
    finally:
        worker.close()


def test_a_worker_that_is_closed_is_gone(tmp_path: Path) -> None:
    worker = Worker(queue.Queue())
    pid = worker._process.pid
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
