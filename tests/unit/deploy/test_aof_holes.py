"""Holes in append-only files: what is dropped, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.deploy.aof_holes import close_holes, find_holes
from anabranch.schemas.errors import AppendOnlyFileError


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


ZEROS_INSIDE = command(b"SET", b"k", bytes(5000))
STAMP = b"#TS:1796077957\r\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "appendonly.aof.2.incr.aof"


def test_a_file_without_holes_is_not_touched(file: Path) -> None:
    for content in (b"", command(b"MULTI") + STAMP + ZEROS_INSIDE + command(b"EXEC")):
        file.write_bytes(content)
        before = file.stat()
        assert close_holes(file) == []
        assert (file.read_bytes(), file.stat().st_ino) == (content, before.st_ino)


def test_holes_go_and_nothing_else(file: Path) -> None:
    parts = [command(b"MULTI"), bytes(1676), ZEROS_INSIDE, STAMP, bytes(1), command(b"EXEC"), bytes(3 * 2**20)]
    file.write_bytes(b"".join(parts))
    file.chmod(0o640)
    expected = [(15, 1676), (15 + 1676 + len(ZEROS_INSIDE) + len(STAMP), 1), (len(b"".join(parts[:-1])), 3 * 2**20)]
    assert find_holes(file) == expected
    assert close_holes(file) == expected
    assert file.read_bytes() == b"".join(part for part in parts if part.strip(b"\0"))
    assert file.stat().st_mode & 0o777 == 0o640
    assert close_holes(file) == []
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 50), max_size=6),
)
def test_whatever_the_commands_are(tmp_path_factory: pytest.TempPathFactory, commands, zeros) -> None:
    file = tmp_path_factory.mktemp("aof") / "x.incr.aof"
    whole = [command(*words) for words in commands]
    file.write_bytes(b"".join(c + bytes(z) for c, z in zip(whole, [*zeros, *[0] * len(whole)], strict=False)))
    close_holes(file)
    assert file.read_bytes() == b"".join(whole)


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_a_command_cut_short_at_the_end_is_left_to_the_server(file: Path, cut: int) -> None:
    content = command(b"SET", b"k", b"v") + bytes(7) + command(b"SET", b"k", b"w" * 100)[:-cut]
    file.write_bytes(content)
    assert close_holes(file) == [(27, 7)]
    assert file.read_bytes() == content.replace(bytes(7), b"")


@pytest.mark.parametrize(
    ("content", "at"),
    [
        (command(b"MULTI") + b"\xff" + command(b"EXEC") * 9, 15),
        (b"*1\r\n$5\r\nMULTIxx" + command(b"EXEC"), 13),
        (b"*x\r\n", 0),
        (b"*1\r\n*5\r\nMULTI\r\n", 4),
        (b"\xff" * 100, 0),
    ],
)
def test_other_damage_is_refused_by_its_place_and_nothing_is_changed(file: Path, content: bytes, at: int) -> None:
    file.write_bytes(content)
    with pytest.raises(AppendOnlyFileError, match=rf"damaged at byte {at}, .* nothing was changed"):
        close_holes(file)
    assert file.read_bytes() == content
