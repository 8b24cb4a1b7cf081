"""Every fate once, durable before anybody acts on it, through crashes and full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.fate_files import count_fates, read_fates
from anabranch.consumers.fate_log import FateLog
from anabranch.schemas.errors import FateLogError, TemporaryError
from tests.fates import record


def open_log(folder: Path, *, lines: int = 1000, recall: int = 1000, since: tuple[int, int] | None = None) -> FateLog:
    return FateLog(folder, file_lines=lines, recall=recall, since=since)


def seqs(folder: Path) -> list[int]:
    return [r.seq for r in read_fates(folder)]


def test_what_was_appended_is_there_for_the_next(tmp_path: Path) -> None:
    log = open_log(tmp_path / "fates")
    log.append([record(seq=0), record(seq=1, fate="dropped:age")])
    log.close()
    again = open_log(tmp_path / "fates")
    assert [again.fate(("east", "east-0-ab", seq)) for seq in range(3)] == ["trained", "dropped:age", None]
    assert again.counts == {"east": {"trained": 1, "dropped:age": 1}}
    assert again.position == (1, 2)
    again.close()


def test_a_delivery_is_logged_once_and_the_first_fate_stays(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([record(seq=0)])
    log.append([record(seq=0, fate="dropped:age"), record(seq=1), record(seq=1)])
    assert [(r.seq, r.fate) for r in read_fates(tmp_path)] == [(0, "trained"), (1, "trained")]
    assert log.counts == {"east": {"trained": 2}}
    log.close()


def test_files_have_about_so_many_lines_and_are_counted_without_being_read_again(tmp_path: Path) -> None:
    log = open_log(tmp_path, lines=3)
    for seq in range(8):
        log.append([record(seq=seq, region=["east", "west"][seq % 2])])
    log.close()
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["000001.jsonl", "000002.jsonl", "000003.jsonl"]
    assert seqs(tmp_path) == list(range(8))
    size = (tmp_path / "000001.jsonl").stat().st_size
    (tmp_path / "000001.jsonl").write_bytes(b"?" * size)
    assert count_fates(tmp_path) == {"east": {"trained": 4}, "west": {"trained": 4}}
    (tmp_path / "000001.counts.json").write_bytes(b"{")
    assert count_fates(tmp_path) == {"east": {"trained": 2}, "west": {"trained": 3}}, "then what is readable counts"


@pytest.mark.parametrize("torn", range(1, 40, 6))
def test_a_line_that_a_crash_left_in_half_is_cut_off(tmp_path: Path, torn: int) -> None:
    log = open_log(tmp_path)
    log.append([record(seq=0)])
    log.close()
    with (tmp_path / "000001.jsonl").open("ab") as file:
        file.write(record(seq=1).line()[:torn])
    assert seqs(tmp_path) == [0], "a reader passes over it"
    log = open_log(tmp_path)
    assert log.fate(("east", "east-0-ab", 1)) is None
    log.append([record(seq=1)])
    log.close()
    assert seqs(tmp_path) == [0, 1]


def test_a_damaged_line_costs_that_line(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(record(seq=seq) for seq in range(3))
    log.close()
    lines = (tmp_path / "000001.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "000001.jsonl").write_bytes(lines[0] + b"?" + lines[1][1:] + lines[2])
    log = open_log(tmp_path)
    assert [log.fate(("east", "east-0-ab", seq)) for seq in range(3)] == ["trained", None, "trained"]
    assert log.position == (1, 3)
    log.close()


def test_only_so_many_are_remembered_but_all_since_the_checkpoint(tmp_path: Path) -> None:
    log = open_log(tmp_path, lines=10, recall=5)
    position = (0, 0)
    for seq in range(50):
        if seq == 20:
            position = log.position
        log.append([record(seq=seq)])
    known = [seq for seq in range(50) if log.fate(("east", "east-0-ab", seq))]
    assert known == list(range(45, 50))
    log.close()
    log = open_log(tmp_path, lines=10, recall=5, since=position)
    assert next(seq for seq in range(50) if log.fate(("east", "east-0-ab", seq))) <= 20
    log.close()
    log = open_log(tmp_path, lines=10, recall=5)
    assert not log.fate(("east", "east-0-ab", 20))
    log.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(FateLogError, match="another learner writes to"):
        open_log(tmp_path)
    log.close()
    open_log(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FateLogError, match=r"cannot open the fates of groups in .*file"):
        open_log(tmp_path / "file" / "fates")


def test_a_full_disk_leaves_nothing_of_the_call_and_it_may_be_repeated(small_disk) -> None:
    folder, full = small_disk
    log = open_log(folder / "fates")
    log.append([record(seq=0)])
    many = [record(seq=seq) for seq in range(1, 5000)]
    with full():
        failed = None
        try:
            log.append(many)
        except FateLogError as error:
            failed = str(error)
    assert failed is not None
    assert "the fates of 4999 groups cannot be written to" in failed
    assert log.fate(("east", "east-0-ab", 1)) is None
    assert seqs(folder / "fates") == [0]
    log.append(many[:100])
    log.close()
    assert seqs(folder / "fates") == list(range(101))


def test_a_next_file_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path, lines=1)
    log.append([record(seq=0)])
    real = os.open

    def no_room(path, *args, **kwargs):
        if str(path).endswith("000002.jsonl"):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(os, "open", no_room)
        for _ in range(2):
            with pytest.raises(FateLogError, match="No space left"):
                log.append([record(seq=1)])
    assert log.position == (1, 1)
    log.append([record(seq=1)])
    log.close()
    assert (seqs(tmp_path), log.position) == ([0, 1], (2, 1))


def test_a_crash_after_an_append_loses_nothing_of_it(tmp_path: Path) -> None:
    """The process dies at once when `append` has returned."""
    code = (
        "import os, sys; from pathlib import Path; from anabranch.consumers.fate_log import FateLog\n"
        "from anabranch.schemas.fates import parse_fate\n"
        "log = FateLog(Path(sys.argv[1]), file_lines=2)\n"
        "for line in sys.stdin: log.append([parse_fate(line)])\n"
        "os.kill(os.getpid(), 9)"
    )
    lines = b"".join(record(seq=seq).line() for seq in range(5))
    done = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path)], input=lines, timeout=60, check=False)
    assert done.returncode == -9
    assert seqs(tmp_path) == list(range(5))
    open_log(tmp_path).close()


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 30), max_size=5),  # appended
            st.just("reopen"),
            st.integers(1, 200),  # bytes of a torn write before a reopen
        ),
        max_size=20,
    )
)
def test_the_log_is_the_first_fate_of_each_in_order(tmp_path_factory: pytest.TempPathFactory, acts) -> None:
    folder = tmp_path_factory.mktemp("log")
    log, expected = open_log(folder, lines=4), []
    for act in acts:
        if isinstance(act, list):
            log.append(record(seq=seq) for seq in act)
            expected += [seq for seq in dict.fromkeys(act) if seq not in expected]
            continue
        log.close()
        if isinstance(act, int):
            newest = max(folder.glob("*.jsonl"))
            with newest.open("ab") as file:
                file.write(record(seq=99).line()[: min(act, len(record(seq=99).line()) - 1)])
                os.fsync(file.fileno())
        log = open_log(folder, lines=4)
        assert all(log.fate(("east", "east-0-ab", seq)) for seq in expected)
    log.close()
    assert seqs(folder) == expected
    assert sum(sum(c.values()) for c in count_fates(folder).values()) == len(expected)


@pytest.mark.parametrize("fates", [{"east": {"trained": "x"}}, {"east": ["trained"]}, {"east": {"trained": None}}])
def test_counts_that_are_no_counts_are_made_again(tmp_path: Path, fates: object) -> None:
    log = FateLog(tmp_path, file_lines=1)
    for seq in (1, 2):
        log.append([record(seq=seq)])
    log.close()
    size = (tmp_path / "000001.jsonl").stat().st_size
    (tmp_path / "000001.counts.json").write_text(json.dumps({"bytes": size, "fates": fates}))
    again = FateLog(tmp_path, file_lines=1)
    assert sum(again.counts["east"].values()) == 2
    again.close()


def test_a_log_that_somebody_removed_takes_nothing(tmp_path: Path) -> None:
    log = FateLog(tmp_path, file_lines=10)
    log.append([record(seq=1)])
    (tmp_path / "000001.jsonl").unlink()
    with pytest.raises(TemporaryError, match="somebody removed"):
        log.append([record(seq=2)])
    assert log.fate(record(seq=2).identity) is None
    log.close()
    again = FateLog(tmp_path, file_lines=10)
    again.append([record(seq=2)])
    again.close()
    assert [r.seq for r in read_fates(tmp_path)] == [2]
