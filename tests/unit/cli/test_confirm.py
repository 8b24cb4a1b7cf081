from __future__ import annotations

import argparse
import io

import pytest

from anabranch.cli.confirm import add_yes, confirmed


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="x")
    add_yes(parser)
    parser.set_defaults(error=parser.error)
    return parser.parse_args(argv)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "yes"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_person_is_asked(monkeypatch, capsys, answer, yes):
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert confirmed(parsed()) is yes
    said = capsys.readouterr()
    assert said.err == "Go on? [y/N] "
    assert said.out == ("" if yes else "nothing was changed\n")


def test_without_a_terminal_it_wants_yes(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(SystemExit, match="2"):
        confirmed(parsed())
    assert "give --yes" in capsys.readouterr().err
    assert confirmed(parsed("--yes"))
