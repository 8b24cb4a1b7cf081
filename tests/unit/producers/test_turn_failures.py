"""Failures of a node's turn: pauses that count for all its processes, who goes first, and what is shown."""

from __future__ import annotations

import os

import pytest

from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.producers.turn_failures import RETRY_LAST_S, ROTATE, TAKEOVER_S, TurnFailures
from anabranch.schemas.errors import DeadlineError, ManifestError, StreamUnavailableError
from tests.weights import LAYOUT

BROKEN, AWAY, HELD = ManifestError("no path"), StreamUnavailableError("gone"), DeadlineError("held")


class Node:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.memory = MirrorMemory.make(LAYOUT, "r")
        self.mine, self.other = self.view(), self.view()

    def view(self) -> TurnFailures:
        return TurnFailures(self.memory, lambda: self.now_s)


@pytest.fixture
def node() -> Node:
    return Node()


def test_without_a_failure_nobody_waits(node: Node) -> None:
    assert (node.mine.pause_s(), node.other.pause_s(), node.other.reason()) == (0.0, 0.0, "")


def test_a_pause_is_everybodys_and_grows_until_something_works(node: Node) -> None:
    pauses = []
    for view in [node.mine, node.other] * 6:
        view.failed(HELD)
        assert view.is_mine
        assert node.mine.is_mine + node.other.is_mine == 1
        assert node.mine.pause_s() == node.other.pause_s() > 0
        pauses.append(node.mine.pause_s())
        node.now_s += pauses[-1]
        assert (node.mine.pause_s(), node.other.pause_s()) == (0.0, 0.0)
    assert pauses[0] < pauses[3] < pauses[-1] <= RETRY_LAST_S
    node.other.failed(AWAY)
    node.other.worked()
    assert (node.mine.pause_s(), node.mine.reason()) == (0.0, "")
    node.mine.failed(AWAY)
    assert node.mine.pause_s() <= pauses[0] * 2, "it begins anew"


def test_a_mirror_that_moved_meanwhile_begins_anew_too(node: Node) -> None:
    for _ in range(10):
        node.mine.failed(AWAY)
    node.memory.header["now"]["seq"][0] += 1
    node.mine.failed(AWAY)
    assert node.mine.pause_s() <= 0.2


@pytest.mark.parametrize("error", [BROKEN, AWAY])
def test_who_has_begun_to_fetch_tries_again_first_but_not_always(node: Node, error: Exception) -> None:
    first = []
    for _ in range(2 * ROTATE):
        node.mine.failed(error)
        first.append(node.mine.pause_s() < node.other.pause_s())
        assert abs(node.mine.pause_s() - node.other.pause_s()) == pytest.approx(TAKEOVER_S)
    assert first == ([True] * (ROTATE - 1) + [False]) * 2
    node.now_s += RETRY_LAST_S + TAKEOVER_S
    assert node.other.pause_s() == 0, "a process that died holds nobody up"


def test_the_reason_names_whose_it_is_and_is_cut_to_what_fits(node: Node) -> None:
    node.mine.failed(ManifestError("ä" * 1000))
    said = node.other.reason()
    assert said.startswith(f"process {os.getpid()}: ää")
    assert set(said.split(": ")[1]) == {"ä"}


def test_a_time_of_another_clock_holds_nobody_up(node: Node) -> None:
    node.mine.failed(AWAY)
    node.now_s -= 1000
    assert node.other.pause_s() == 0
