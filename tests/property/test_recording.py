"""Whatever a recorder is at when it dies, and however its entries come: every row of the stream stands in its files once.

The moments of death are those between any two acts that last: fsync, rename, unlink, and the acknowledgement, before and after it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.recorded_files import recorded_files
from anabranch.transport.memory_stream import MemoryStream
from tests.dying import Death, Killed, dies_after
from tests.groups import entry, group
from tests.recorders import Lab, Settles
from tests.streams import put

DAY_S = 86_400
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 3)),  # of that epoch
        st.tuples(st.just("die"), st.integers(0, 14)),  # after so many acts
        st.sampled_from([("poll", 0), ("poll", 0), ("time", 21), ("time", DAY_S), ("copy", 0)]),
    ),
    min_size=4,
    max_size=40,
)


class Mortal(MemoryStream):
    death: Death | None = None

    def settle(self, group: str, fates: Settles) -> int:
        if self.death is None:
            return super().settle(group, fates)
        settled = int(self.death.before(super().settle)(group, fates))
        self.death.before(lambda: None)()  # acknowledged, and nobody heard of it
        return settled


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_every_row_stands_once_whatever_the_recorder_was_at(actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), "east", rows_per_file=8)
        epochs: list[int] = []
        stream = Mortal(lab.world.stores["east"])
        recorder = lab.recorder({"east": stream})
        for action, number in actions:
            if action == "append":
                for epoch in (number, 1):  # a poll gives several partitions
                    rollouts = group(len(epochs), epoch=epoch).rollouts
                    put(lab.world.stream("east"), entry(len(epochs), rollouts=rollouts))
                    epochs.append(epoch)
            elif action == "poll":
                recorder.poll()
            elif action == "time":
                lab.clock.now_s += number
            elif action == "copy":
                for fields in list(lab.world.stores["east"].entries.values())[-1:]:
                    lab.world.stores["east"].add(fields)
            else:
                lab.clock.now_s += 21  # what is buffered is due
                with contextlib.suppress(Killed), dies_after(number) as stream.death:
                    recorder.poll()
                    recorder.flush()
                assert set(rows_on_disk(lab.directory).values()) <= {2}, "twice, or in part"
                stream = Mortal(lab.world.stores["east"])
                recorder = lab.recorder({"east": stream})
        while recorder.poll():
            pass
        recorder.flush()
        assert rows_on_disk(lab.directory) == Counter({pair: 2 for pair in enumerate(epochs)})
        assert lab.pending("east") == 0
        assert not list(lab.directory.rglob("*.tmp"))


def rows_on_disk(directory: Path) -> Counter[tuple[int, int]]:
    """(group, epoch of its partition) -> rows; each group has two."""
    rows: Counter[tuple[int, int]] = Counter()
    for file in recorded_files(directory):
        assert file.partition.epoch is not None
        for index in pq.read_table(file.path, columns=["group_index"], partitioning=None)["group_index"].to_pylist():
            rows[index, file.partition.epoch] += 1
    return rows
