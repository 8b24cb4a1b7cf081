"""Whatever a keeper is at when it dies, and whatever the recorder writes meanwhile: the rows that count are those that were recorded, each once."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers import keeper as keeping
from anabranch.consumers.keeper import Keeper
from anabranch.consumers.parquet_writer import remove_leftovers
from anabranch.schemas.config import RecorderSection
from tests.keeping import counted, fate_of, log_fates, once, record_step, write_groups
from tests.recorders import Clock

ACTIONS = st.lists(
    st.one_of(st.sampled_from(["write", "fates", "step", "turn", "time"]), st.integers(0, 40)), min_size=3, max_size=30
)


class Killed(BaseException):
    pass


class DiesAt:
    """Counts what changes a directory, and dies before one of these acts."""

    def __init__(self, patch: Any, at: int) -> None:
        self.left = at
        for name in ("rename", "unlink", "fsync"):
            patch[name] = getattr(os, name)
            setattr(os, name, self._counted(patch[name]))

    def _counted(self, act: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return act(*args, **kwargs)

        return counted


@settings(max_examples=30, deadline=None)
@given(actions=ACTIONS)
def test_rows_count_once_at_every_moment(actions: list[str | int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, clock = Path(folder), Clock()
        (run / "trajectories").mkdir()
        written, told = 0, 0

        def start() -> Keeper:
            remove_leftovers(run / "trajectories")
            return Keeper(run, RecorderSection(), naming=threading.Lock(), clock=clock, now_ms=lambda: 10**12)

        made = start()
        for action in actions:
            if action == "write":
                for _ in range(3):
                    write_groups(run, written, epoch=1 + written // 20)
                    written += 1
            elif action == "fates":
                log_fates(run, *(fate_of(i, "trained" if i % 2 else "dropped:age") for i in range(told, written)))
                told = written
            elif action == "step":
                record_step(run, *range(written + 1))
            elif action == "turn":
                made.turn()
            elif action == "time":
                clock.now_s += keeping.GRACE_S
            else:
                patch: dict[str, Any] = {}
                try:
                    DiesAt(patch, int(action))
                    made.turn()
                except Killed:
                    pass
                finally:
                    for name, act in patch.items():
                        setattr(os, name, act)
                assert counted(run) == once(range(written))
                made = start()
            assert counted(run) == once(range(written))
