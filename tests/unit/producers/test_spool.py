"""The spool of one producer: what was put stays until it is released, within its bound, over kills and damage."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from anabranch.producers.spool import OVERHEAD, Spool
from anabranch.producers.spool_file import RECORD_HEADER, SEGMENT_HEADER, record_header
from anabranch.producers.spool_load import read_spool, spool_folders
from anabranch.schemas.errors import BackpressureError, SpoolError, TrajectoryError
from anabranch.schemas.trajectory import decode_group
from tests.spools import everything, fill, payload, section, segments, small_disk

SMALL = section(max_bytes=2**16, segment_bytes=4096)


def new(folder: Path, **values: object) -> Spool:
    return Spool(folder, section(**{"max_bytes": 2**16, "segment_bytes": 4096, **values}), producer="east-00-abc123")


def again(folder: Path) -> Spool:
    return Spool(folder, SMALL)


def numbers(spool: Spool) -> list[int]:
    assert all(e.payload == payload(e.seq, len(e.payload)) and e.group_index == 10 * e.seq for e in everything(spool))
    return [e.seq for e in everything(spool)]


def test_what_was_put_is_read_in_order(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 200, size=100)
    assert len(segments(tmp_path)) > 4
    assert numbers(spool) == list(range(1, 201))
    assert spool.groups(198) == [1980, 1990, 2000]
    assert spool.groups(1, 3) == [10, 20]


def test_the_next_process_goes_on_under_the_same_name_and_numbers(tmp_path: Path) -> None:
    fill(new(tmp_path), 7)
    spool = again(tmp_path)
    assert (spool.producer, spool.next_seq, spool.opened_at) == ("east-00-abc123", 8, 8)
    fill(spool, 3)
    assert numbers(again(tmp_path)) == list(range(1, 11))


def test_numbers_go_on_although_everything_was_released(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 100, size=200)
    spool.release(101)
    assert len(segments(tmp_path)) == 1
    assert spool.bytes_held == SEGMENT_HEADER
    spool = again(tmp_path)
    assert spool.next_seq == 101
    fill(spool, 1)


def test_a_released_group_is_not_read_again_and_files_go_when_all_in_them_is_released(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 100, size=200)
    before = len(segments(tmp_path))
    spool.release(51)
    assert spool.floor == 51
    assert len(segments(tmp_path)) == before // 2 + 1
    assert numbers(spool) == list(range(51, 101))
    spool.release(20)
    assert spool.floor == 51, "what was released once stays so"


def test_files_that_cannot_be_removed_are_told_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = new(tmp_path)
    fill(spool, 140, size=400)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(
            Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))
        )
        spool.release(100)
        spool.release(141)
        with pytest.raises(BackpressureError, match=r"cannot make room: .*Read-only file system"):
            fill(spool, 1, size=60_000)
    assert [line["event"] for line in logs] == ["a file of the spool cannot be removed"]
    assert spool.floor == 141
    spool.release(141)
    fill(spool, 1, size=60_000)
    assert sum(p.stat().st_size for p in segments(tmp_path)) <= 2**16


def test_compacted_it_says_to_whoever_opens_it_that_nothing_is_kept(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 9)
    spool.release(9)
    spool.compact()
    assert again(tmp_path).floor == 1, "one is kept still"
    spool.release(10)
    spool.compact()
    spool.compact()
    found = again(tmp_path)
    assert (found.floor, found.next_seq, len(segments(tmp_path))) == (10, 10, 1)


def test_at_its_bound_it_refuses_and_loses_nothing(tmp_path: Path) -> None:
    spool = new(tmp_path)
    with pytest.raises(BackpressureError, match=r"holds \d+ bytes and takes no further 1040: spool.max_bytes is 65536"):
        fill(spool, 1000, size=1000)
    count = spool.next_seq - 1
    assert 55 < count < 64
    assert sum(p.stat().st_size for p in segments(tmp_path)) <= 2**16
    spool.release(10)
    fill(spool, 3, size=1000)
    assert numbers(spool) == list(range(10, count + 4))


def test_a_record_as_large_as_the_bound_fits_again_and_again(tmp_path: Path) -> None:
    spool = new(tmp_path)
    for seq in range(1, 4):
        fill(spool, 1, size=2**16 - OVERHEAD)
        assert sum(p.stat().st_size for p in segments(tmp_path)) == 2**16
        with pytest.raises(BackpressureError):
            fill(spool, 1)
        spool.release(seq + 1)
    fill(spool, 1)


def test_a_batch_is_bounded_and_holds_one_record_at_least(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 30, size=500)
    assert [e.seq for e in spool.read(2, max_bytes=1600, max_records=99)] == [2, 3, 4]
    assert [e.seq for e in spool.read(2, max_bytes=1, max_records=99)] == [2]
    assert [e.seq for e in spool.read(2, max_bytes=2**20, max_records=2)] == [2, 3]
    assert spool.read(31, max_bytes=2**20, max_records=9) == []


class Failing:
    """os.pwritev that takes `room` bytes and then fails with `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, room: int = 25) -> None:
        self.code, self.room = code, room
        real = os.pwrite
        monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: self.take(real, fd, b"".join(parts), at))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: self.take(real, fd, data, at))

    def take(self, real, fd: int, data: bytes, at: int) -> int:
        if self.code == 0:
            return real(fd, data, at)
        if self.room == 0:
            raise OSError(self.code, os.strerror(self.code))
        taken, self.room = min(self.room, len(data)), max(0, self.room - len(data))
        return real(fd, data[:taken], at)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("cannot_cut", [False, True])
def test_what_a_full_disk_left_of_a_record_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, cannot_cut: bool
) -> None:
    spool = new(tmp_path)
    fill(spool, 3)
    size = segments(tmp_path)[0].stat().st_size
    disk = Failing(monkeypatch, code)
    real_cut, broken = os.ftruncate, cannot_cut
    monkeypatch.setattr(os, "ftruncate", lambda fd, n: disk.take(None, fd, b"x", 0) if broken else real_cut(fd, n))
    with pytest.raises(OSError, match=segments(tmp_path)[0].name):
        spool.append(40, payload(4))
    assert segments(tmp_path)[0].stat().st_size == size + (25 if cannot_cut else 0)
    assert [seq for _, seq, _, _ in read_spool(tmp_path)] == [1, 2, 3]
    disk.code, broken = 0, False
    fill(spool, 2, size=3)  # shorter than what was left behind
    assert numbers(spool) == [1, 2, 3, 4, 5]
    assert numbers(again(tmp_path)) == [1, 2, 3, 4, 5]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", 256 * 1024) as disk:
            spool = new(disk, max_bytes=2**20, segment_bytes=32 * 1024)
            with pytest.raises(OSError, match="No space left on device"):
                fill(spool, 1000, size=3000)
            count = spool.next_seq - 1
            with pytest.raises(OSError, match="No space left on device"):
                fill(spool, 1, size=3000)
            assert count > 60
            assert len(list(read_spool(disk))) == count
            spool.release(20)
            fill(spool, 10, size=3000)
            assert numbers(Spool(disk, SMALL))[-1] == count + 10
            spool.close()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting is not allowed here: {error.stderr!r}")


def test_fsync_always_comes_before_a_group_counts_as_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = new(tmp_path, fsync="always")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    fill(spool, 2)
    assert synced == [SEGMENT_HEADER + n * (RECORD_HEADER + 20) for n in (1, 2)]
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        spool.append(1, b"x")
    assert again(tmp_path).next_seq == 3


def test_sync_reaches_every_file_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = new(tmp_path)
    fill(spool, 60, size=200)
    files = segments(tmp_path)
    synced: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    spool.sync()
    assert sorted(synced) == [str(p) for p in files]
    spool.sync()
    assert len(synced) == len(files)
    fill(spool, 1)
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        spool.sync()
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append("again"))
    spool.sync()
    assert synced[-1] == "again", "what failed is tried again"


def test_an_unreadable_group_keeps_its_number_as_a_tombstone(tmp_path: Path) -> None:
    """The stream's numbers must have no gap, and what is behind the damage must get through."""
    fill(new(tmp_path), 9, size=300)
    path = segments(tmp_path)[0]
    content = bytearray(path.read_bytes())
    row = RECORD_HEADER + 300
    content[SEGMENT_HEADER + 2 * row + RECORD_HEADER + 5] ^= 1  # payload of record 3
    content[SEGMENT_HEADER + 5 * row + 9] ^= 1  # header of record 6
    path.write_bytes(content)
    with capture_logs() as logs:
        spool = again(tmp_path)
        found = everything(spool)
        everything(spool)
    assert [e.seq for e in found] == list(range(1, 10))
    dead = {e.seq: e for e in found if e.payload != payload(e.seq, 300)}
    assert {seq: e.group_index for seq, e in dead.items()} == {3: 30, 6: 0}
    for envelope in dead.values():
        assert envelope.payload.startswith(b"unreadable: record ")
        with pytest.raises(TrajectoryError, match="not a trajectory batch"):
            decode_group(envelope.payload)
    lost = [line for line in logs if line["event"].startswith("a spooled group is unreadable")]
    assert [(line["seq"], line["lost"], line["log_level"]) for line in lost] == [(3, 1, "error"), (6, 2, "error")]
    assert "checksum mismatch" in lost[0]["error"]
    assert [line["damage"] for line in logs if "damage" in line] == [
        f"{row} bytes at {SEGMENT_HEADER + 5 * row} are no record",
        "records 6 to 6 are missing",
    ]
    assert 0 not in spool.groups(1), "nobody knows which group it was"
    fill(spool, 2)
    assert [e.seq for e in everything(again(tmp_path))] == list(range(1, 12))


def test_nothing_is_written_behind_damage_at_the_end(tmp_path: Path) -> None:
    fill(new(tmp_path), 3)
    path = segments(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[-RECORD_HEADER - 20] ^= 1  # the last record's magic
    path.write_bytes(content)
    spool = again(tmp_path)
    assert spool.next_seq == 3
    fill(spool, 1)
    assert path.read_bytes() == content
    assert numbers(again(tmp_path)) == [1, 2, 3]


def test_a_file_that_is_gone_costs_its_groups_and_no_number(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 60, size=200)
    files = segments(tmp_path)
    files[1].unlink()
    firsts = [int(p.name.split(".")[1]) for p in files]
    for found in (everything(spool), everything(again(tmp_path))):
        assert [e.seq for e in found] == list(range(1, 61))
        tombs = [e.seq for e in found if e.payload.startswith(b"unreadable")]
        assert tombs == list(range(firsts[1], firsts[2]))


def test_an_older_state_of_the_files_goes_on_where_the_stream_stands(tmp_path: Path) -> None:
    """The machine lost power: the stream has records 6 to 8, and this spool ends at 5 and gave 6 to another group."""
    fill(new(tmp_path), 5)
    spool = again(tmp_path)
    spool.append(777, b"put before the stream could be asked")
    assert spool.renumber(9) == 1
    assert spool.next_seq == 10
    (moved,) = spool.read(9, max_bytes=1000, max_records=10)
    assert (moved.seq, moved.group_index, moved.payload) == (9, 777, b"put before the stream could be asked")
    assert spool.groups(9) == [777]
    assert again(tmp_path).next_seq == 10


def test_only_groups_under_numbers_that_are_taken_are_written_again(tmp_path: Path) -> None:
    fill(new(tmp_path), 5)
    spool = again(tmp_path)
    for index in (106, 107, 108):
        spool.append(index, b"%d" % index)
    assert spool.renumber(7) == 1  # the stream knows a 6 that is not ours
    assert [(e.seq, e.group_index) for e in everything(spool)][5:] == [(6, 106), (7, 107), (8, 108), (9, 106)]


def test_renumbering_goes_on_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(new(tmp_path), 5)
    spool = again(tmp_path)
    for index in (106, 107):
        spool.append(index, b"%d" % index)
    disk = Failing(monkeypatch, errno.ENOSPC, room=RECORD_HEADER + 3)
    with pytest.raises(OSError, match="No space left"):
        spool.renumber(20)
    disk.code = 0
    assert spool.renumber(20) == 1
    assert [(e.seq, e.group_index) for e in spool.read(20, max_bytes=999, max_records=9)] == [(20, 106), (21, 107)]


def test_a_folder_of_several_spools_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="holds the spools of nobody"):
        again(tmp_path)
    fill(new(tmp_path), 1)
    segments(tmp_path)[0].with_name("west-01-ffffff.00000000000000000001.spool").write_bytes(b"")
    with pytest.raises(SpoolError, match="holds the spools of east-00-abc123, west-01-ffffff; expected one producer"):
        again(tmp_path)


def test_somebody_else_reads_a_spool_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "east" / "00").mkdir(parents=True)
    spool = new(tmp_path / "east" / "00")
    fill(spool, 60, size=200)
    reader = read_spool(spool.folder)
    assert [next(reader)[:3] for _ in range(3)] == [("east-00-abc123", seq, 10 * seq) for seq in (1, 2, 3)]
    spool.release(40)
    rest = [seq for _, seq, _, _ in reader]
    assert rest[-20:] == list(range(41, 61))
    assert spool_folders(tmp_path) == [spool.folder]


class Model(RuleBasedStateMachine):
    """Puts, releases, kills at any byte of a write: never a number twice, never a group less than was put and kept."""

    @initialize()
    def begin(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.section = section(max_bytes=2**16, segment_bytes=4096)
        self.spool = Spool(self.folder, self.section, producer="p-00-aaaaaa")
        self.kept: dict[int, tuple[int, bytes]] = {}
        self.released = 1

    @rule(index=st.integers(0, 2**62), size=st.integers(0, 9000))
    def put(self, index: int, size: int) -> None:
        content = payload(index, size)
        try:
            seq = self.spool.append(index, content)
        except BackpressureError:
            assert self.spool.bytes_held + size + RECORD_HEADER + SEGMENT_HEADER > 2**16
            return
        assert seq == max(self.kept, default=0) + 1
        self.kept[seq] = index, content

    @precondition(lambda self: self.kept)
    @rule(part=st.floats(0, 1))
    def release(self, part: float) -> None:
        below = self.spool.floor + round(part * (self.spool.next_seq - self.spool.floor))
        self.spool.release(below)
        self.released = max(self.released, below)

    @rule(torn=st.integers(0, 500))
    def killed(self, torn: int) -> None:
        """In the middle of writing the next record."""
        self.spool.close()
        half = (record_header(self.spool.next_seq, 5, b"y" * 500) + b"y" * 500)[:torn]
        with segments(self.folder)[-1].open("ab") as file:
            file.write(half)
        self.spool = Spool(self.folder, self.section)
        self.released = self.spool.floor

    @invariant()
    def all_is_there(self) -> None:
        if not hasattr(self, "spool"):
            return
        expected = {seq: row for seq, row in self.kept.items() if seq >= self.released}
        assert {e.seq: (e.group_index, e.payload) for e in everything(self.spool)} == expected
        assert sum(p.stat().st_size for p in segments(self.folder)) == self.spool.bytes_used <= 2**16
        assert self.spool.next_seq == max(self.kept, default=0) + 1

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.spool.close()
            self.place.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_file_that_somebody_removed_takes_nothing(tmp_path: Path) -> None:
    spool = new(tmp_path)
    fill(spool, 2)
    for path in segments(tmp_path):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="somebody removed"):
        spool.append(1, b"x")
    assert spool.next_seq == 3
