"""Whatever happens to a recorder: on disk every entry stands once, in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.recorded_files import TRAJECTORIES_DIRECTORY
from anabranch.consumers.recorder import Recorder
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import read_batch
from anabranch.transport.memory_stream import MemoryStream
from tests.groups import entry
from tests.recorders import Cut, DiesBeforeAcknowledging, Lab, files
from tests.streams import put


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, "east", "west")


def test_a_file_is_written_when_enough_rows_are_there_and_only_then_acknowledged(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east", 2)
    assert recorder.poll() == 2
    assert (lab.on_disk("east"), lab.pending("east"), recorder.buffered) == ([], 2, 2)
    lab.append("east")
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east"), recorder.buffered) == ([0, 1, 2], 0, 0)
    assert (recorder.rows_written, recorder.files_written) == (6, 1)


def test_a_file_is_written_when_its_time_has_come(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east")
    recorder.poll()
    lab.clock.now_s += 19
    recorder.poll()
    assert lab.on_disk("east") == []
    lab.clock.now_s += 2
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0], 0)


def test_a_file_is_written_when_its_rows_take_enough_bytes(tmp_path: Path) -> None:
    group_bytes = read_batch(entry().payload).nbytes
    lab = Lab(tmp_path, "east", rows_per_file=1000, bytes_per_file=3 * group_bytes)
    recorder = lab.recorder()
    for expected in ([], [], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4, 5]):
        lab.append("east")
        recorder.poll()
        assert lab.on_disk("east") == expected
    assert (lab.pending("east"), recorder.buffered) == (0, 0)


def test_flush_writes_what_is_buffered(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east")
    lab.append("west", 2)
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.on_disk("west")) == ([0], [0, 1])
    recorder.flush()
    assert recorder.files_written == 2, "nothing to write, no file"


def test_a_group_is_recorded_under_the_name_of_its_envelope(tmp_path: Path) -> None:
    """Somebody appends another producer's payload: the learner's fate of it is of the envelope's producer."""
    lab = Lab(tmp_path / TRAJECTORIES_DIRECTORY, "east")
    recorder = lab.recorder()
    sent = entry(1, 1)
    put(lab.world.stream("east"), sent, replace(sent, producer="twin"))
    recorder.poll()
    recorder.flush()
    with RunReader(tmp_path) as reader:
        found = reader.rows("SELECT DISTINCT producer, seq FROM trajectories ORDER BY ALL")
    assert found == [{"producer": "p", "seq": 1}, {"producer": "twin", "seq": 1}]
    assert lab.pending("east") == 0


def test_the_learner_is_not_touched(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east", 3)
    recorder.poll()
    counts = lab.world.stream("east").ledger(LEARNER_GROUP)
    assert (counts.produced, counts.pending, counts.fates) == (3, 3, {})


def test_a_recorder_that_died_before_it_wrote_loses_nothing(lab: Lab) -> None:
    lab.append("east", 2)
    lab.recorder().poll()
    lab.append("east", 2)
    again = lab.recorder()
    again.poll()
    again.poll()
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0)


def test_a_recorder_that_died_between_writing_and_acknowledging_writes_nothing_twice(lab: Lab) -> None:
    lab.append("east", 3)
    doomed = lab.recorder({"east": DiesBeforeAcknowledging(lab.world.stores["east"])})
    with pytest.raises(KeyboardInterrupt):
        doomed.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 3)
    lab.append("east", 2)
    again = lab.recorder()
    assert again.poll() == 3, "work was done, though nothing is to be written: the run must not look quiet"
    again.poll()
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3, 4], 0)


def test_many_pending_entries_on_disk_are_passed_over_page_by_page(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "east", rows_per_file=1000)
    lab.append("east", 300)
    doomed = lab.recorder({"east": DiesBeforeAcknowledging(lab.world.stores["east"])})
    for _ in range(5):
        doomed.poll()
    with pytest.raises(KeyboardInterrupt):
        doomed.flush()
    lab.append("east", 3)
    again = lab.recorder()
    quiet = 0
    while quiet < 3:  # how `record` decides that everything is read
        quiet = 0 if again.poll() else quiet + 1
    again.flush()
    assert lab.on_disk("east") == list(range(303))
    assert lab.pending("east") == 0


def test_a_half_written_file_is_removed_at_start(lab: Lab) -> None:
    torn = lab.directory / "region=east" / "1-1_1-3.tmp"
    torn.parent.mkdir()
    torn.write_bytes(b"PAR1 half")
    lab.append("east", 3)
    lab.recorder().poll()
    assert files(lab.directory) == ["1-1_1-3.parquet"]


def test_an_unreadable_entry_is_passed_over_and_left_to_the_learner(lab: Lab) -> None:
    lab.append("east")
    lab.world.stores["east"].add({b"nonsense": b"1"})
    lab.append("east", 2)
    recorder = lab.recorder()
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 0)
    assert lab.world.stores["east"].dead_letters == []


def test_a_group_that_comes_again_under_another_entry_id_is_not_recorded_twice(lab: Lab) -> None:
    """A server that forgot its last second got it again from the spool; or somebody added a copy."""
    east = lab.world.stores["east"]
    recorder = lab.recorder({"east": lab.world.stream("east")})
    before = east.save()
    lab.append("east", 3)
    recorder.poll()
    assert lab.on_disk("east") == [0, 1, 2]
    east.restore(before)
    put(lab.world.stream("east"), *(entry(index) for index in range(3)))
    lab.append("east")
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0)
    for fields in list(east.entries.values()):
        east.add(fields)
    again = lab.recorder({"east": lab.world.stream("east")})
    while again.poll():
        pass
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0), "a restarted one knows from its files"


def test_a_copy_of_what_is_not_yet_written_is_not_recorded_twice(lab: Lab) -> None:
    recorder = lab.recorder({"east": lab.world.stream("east")})
    lab.append("east")
    east = lab.world.stores["east"]
    east.add(next(iter(east.entries.values())))
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0], 0)


ACTIONS = st.lists(st.sampled_from(["append", "poll", "time", "die", "die unacknowledged", "cut", "mend"]), max_size=25)


@settings(max_examples=40)
@given(actions=ACTIONS)
def test_neither_duplicates_nor_holes_whatever_happens(tmp_path_factory, actions: list[str]) -> None:
    lab = Lab(tmp_path_factory.mktemp("lab"), "east", rows_per_file=6)

    def start(kind: type[MemoryStream]) -> tuple[Recorder, MemoryStream]:
        stream = kind(lab.world.stores["east"])
        return lab.recorder({"east": stream}), stream

    recorder, stream = start(Cut)
    for action in actions:
        if action == "append":
            lab.append("east", 2)
        elif action == "poll":
            recorder.poll()
        elif action == "time":
            lab.clock.now_s += 21
        elif action == "die":
            recorder, stream = start(Cut)
        elif action == "die unacknowledged":
            doomed, _ = start(DiesBeforeAcknowledging)
            try:
                for _ in range(3):
                    doomed.poll()
                doomed.flush()
            except KeyboardInterrupt:
                pass
            recorder, stream = start(Cut)
        else:
            stream.away = ("settle",) if action == "cut" else ()
    recorder, _ = start(Cut)
    while recorder.poll():
        pass
    recorder.flush()
    assert lab.on_disk("east") == list(range(lab.next["east"]))
    assert lab.pending("east") == 0
