"""Two workers share the suite: every test once, and one pipeline at a time."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.remote import Producer

from tests import scheduling
from tests.scheduling import LONG, TOGETHER, WHOLE_MACHINE, WORKERS, ByFile, next_unit, unit_of, worker_count

ROOT = Path(__file__).resolve().parent.parent


class Node:
    """A worker as its scheduler sees it; `asked` are the numbers of the tests that it was given."""

    shutting_down = False

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.gateway = SimpleNamespace(id="")

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.asked += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


class Config:
    option = SimpleNamespace(loadscopereorder=True)

    def getvalue(self, name: str) -> list[str]:
        return {"tx": ["popen"] * WORKERS}[name]


def scheduler(tests: list[str], nodes: list[Node]) -> ByFile:
    made = ByFile(Config(), Producer("", enabled=False))  # type: ignore[arg-type]
    for node in nodes:
        made.add_node(node)  # type: ignore[arg-type]
        made.add_node_collection(node, tests)  # type: ignore[arg-type]
    made.schedule()
    return made


def test_one_pipeline_at_a_time_and_every_test_once() -> None:
    tests = [
        f"{file}::test_{n}" for file in ("tests/a.py", *LONG, "tests/b.py", *reversed(WHOLE_MACHINE)) for n in range(4)
    ]
    nodes = [Node() for _ in range(WORKERS)]
    made, done = scheduler(tests, nodes), [0] * WORKERS
    order: list[str] = []
    while any(done[k] < len(node.asked) for k, node in enumerate(nodes)):
        now = [unit_of(tests[node.asked[at]]) for node, at in zip(nodes, done, strict=True) if at < len(node.asked)]
        assert sum(unit in WHOLE_MACHINE for unit in now) <= 1, now
        for k, node in enumerate(nodes):
            if done[k] < len(node.asked):
                order.append(tests[node.asked[done[k]]])
                made.mark_test_complete(node, node.asked[done[k]])
                done[k] += 1
    assert sorted(order) == sorted(tests)
    assert unit_of(order[0]) == WHOLE_MACHINE[0]
    assert unit_of(order[1]) == LONG[0]
    assert {unit_of(test) for test in order[-4:]} <= {"tests/a.py", "tests/b.py"}


def test_when_nothing_else_is_left_pipelines_run_beside_each_other() -> None:
    assert next_unit(dict.fromkeys(WHOLE_MACHINE[1:]), {WHOLE_MACHINE[0]}) == WHOLE_MACHINE[1]
    assert next_unit(dict.fromkeys(["x.py", "y.py", WHOLE_MACHINE[1]]), {WHOLE_MACHINE[0]}) == "x.py"
    assert next_unit(dict.fromkeys(["x.py", LONG[1], WHOLE_MACHINE[1]]), {"z.py"}) == WHOLE_MACHINE[1]


def test_the_files_that_are_named_are_there() -> None:
    assert [
        name for name in (*WHOLE_MACHINE, *LONG, *TOGETHER, *TOGETHER.values()) if not (ROOT / name).is_file()
    ] == []


@pytest.mark.parametrize(
    ("args", "keyword", "count"),
    [
        (["tests"], "", WORKERS),
        (["tests/unit", "tests/e2e"], "", WORKERS),
        (["tests/test_setup.py"], "", 0),
        (["tests/test_setup.py::test_another_python"], "", 0),
        (["tests"], "name", 0),
    ],
)
def test_workers_are_started_for_much_and_not_for_little(
    monkeypatch: pytest.MonkeyPatch, args: list[str], keyword: str, count: int
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    assert worker_count(args, keyword) == count
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert worker_count(args, keyword) is None, "the user's word counts"
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert worker_count(args, keyword) == 0


def test_a_worker_is_as_isolated_as_who_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling.sys, "executable", "/a b/python")
    expected = ["/a b/python", "-I"] if sys.flags.isolated else ["/a b/python"]
    assert shlex.split(scheduling.isolated_python()) == expected
