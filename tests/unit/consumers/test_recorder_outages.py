"""A region that is away, full or refuses, and a full disk, pause a recorder and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.schemas.errors import AnabranchError, BackpressureError, ConfigError, TemporaryError
from anabranch.transport.stream import TrajectoryStream
from tests.recorders import Cut, Lab, files


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, "east", "west")


def test_a_region_that_is_away_pauses_alone_and_is_read_when_it_is_back(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    east.away = ("read",)
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("east", 3)
    lab.append("west", 3)
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("east"), lab.on_disk("west")) == ([], [0, 1, 2])
    assert list(recorder.paused()) == ["east"], "a paused region is not a quiet one"
    east.away = ()
    lab.clock.now_s += 3
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("east"), recorder.paused()) == ([0, 1, 2], {})


def test_entries_whose_acknowledgement_failed_are_acknowledged_later_and_not_written_again(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    recorder = lab.recorder({"east": east})
    recorder.poll()
    east.away = ("settle",)
    lab.append("east", 3)
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 3)
    with pytest.raises(TemporaryError, match="region east: the region cannot be reached"):
        recorder.flush()
    east.away = ()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 0)


def test_a_region_that_takes_no_writes_pauses_alone(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    east.away, east.error = ("read",), BackpressureError
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("west", 3)
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("west"), list(recorder.paused())) == ([0, 1, 2], ["east"])


def test_flush_writes_every_region_it_can(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("east")
    lab.append("west")
    recorder.poll()
    recorder.poll()
    east.away = ("settle",)
    with pytest.raises(TemporaryError, match="not everything is recorded: region east"):
        recorder.flush()
    assert (lab.on_disk("west"), lab.pending("west")) == ([0], 0)


def test_a_full_disk_pauses_recording_and_nothing_is_lost(small_disk) -> None:
    folder, full = small_disk
    lab = Lab(folder, "east")
    recorder = lab.recorder()
    lab.append("east", 5)
    with full():
        recorder.poll()
        assert list(recorder.paused()) == ["east"]
        for _ in range(4):
            lab.append("east", 3)
            lab.clock.now_s += 3
            recorder.poll()
        assert not [name for name in files(folder) if name.endswith((".tmp", ".parquet"))]
        assert recorder.buffered == 5, "it reads no more than it can write"
        with pytest.raises(TemporaryError, match="not everything is recorded"):
            recorder.flush()
    lab.clock.now_s += 3
    for _ in range(6):
        recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == (list(range(17)), 0)


def test_a_region_that_refuses_pauses_alone_and_is_told_once(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    east.away, east.error = ("read",), ConfigError
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("east", 3)
    lab.append("west", 3)
    with capture_logs() as logs:
        for _ in range(5):
            recorder.poll()
            lab.clock.now_s += 3
    assert (lab.on_disk("west"), list(recorder.paused())) == ([0, 1, 2], ["east"])
    assert [(log["log_level"], log["region"]) for log in logs if "error" in log] == [("error", "east")]
    east.away = ()
    lab.clock.now_s += 60
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("east"), recorder.paused()) == ([0, 1, 2], {})


@pytest.mark.parametrize("error", [ConfigError, AnabranchError])
def test_regions_that_all_refuse_end_the_recorder(lab: Lab, error: type[AnabranchError]) -> None:
    streams: dict[str, TrajectoryStream] = {}
    for name, store in lab.world.stores.items():
        streams[name] = cut = Cut(store)
        cut.away, cut.error = ("read",), error
    with pytest.raises(error, match=r"region east: .*; region west: "):
        lab.recorder(streams).poll()
