"""The supervisor with real processes: restarts, refusals, Ctrl-C, kill -9, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.deploy import janitor
from anabranch.deploy.child import ChildSpec, ChildState, Restart, RestartLimits
from anabranch.deploy.supervisor import End, Outcome, Supervisor

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
QUICK = RestartLimits(budget=2, window_s=60, backoff_s=0.02, backoff_cap_s=0.05)
ENVIRONMENT = {"PATH": os.environ["PATH"]}


def python(code: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *words)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    line = janitor.process_line(pid)
    return line is not None and line.state not in "ZX"


def run(
    tmp_path: Path, *specs: ChildSpec, during: Callable[[Supervisor], None] | None = None
) -> tuple[Outcome, Supervisor]:
    """Run `specs` to the end; `during` is called at every tick."""
    with Supervisor(
        tmp_path / "logs", environment=ENVIRONMENT, limits=QUICK, stop_deadline_s=2, finish_grace_s=2, tick_s=0.02
    ) as it:
        if during is not None:
            it.tick = lambda: during(it)
        for spec in specs:
            it.add(spec)
        outcome = it.run()
    return outcome, it


SLEEP = python("import time; time.sleep(600)")


def test_a_run_is_complete_when_its_main_child_exits_zero_and_the_rest_is_stopped(tmp_path: Path) -> None:
    outcome, supervisor = run(
        tmp_path,
        ChildSpec("server", SLEEP, stop_order=1, restart=Restart.ALWAYS),
        ChildSpec("main", python("print('done')"), completes_run=True),
    )
    assert (outcome.end, outcome.exit_code) == (End.COMPLETED, 0)
    assert [child.state for child in supervisor.children] == [ChildState.STOPPED, ChildState.ENDED]
    assert (tmp_path / "logs/main.log").read_text() == "done\n"


def test_a_child_that_ends_itself_gets_its_time_before_it_is_told_to(tmp_path: Path) -> None:
    flag = tmp_path / "flushed"
    slow = python("import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').close()", str(flag))
    outcome, _ = run(
        tmp_path,
        ChildSpec("recorder", slow, ends_itself=True),
        ChildSpec("main", python(""), completes_run=True),
    )
    assert outcome.end is End.COMPLETED
    assert flag.exists()


def test_a_child_that_ends_itself_before_the_run_is_complete_is_started_again(tmp_path: Path) -> None:
    """A producer that somebody told to stop would be missed for ever."""
    starts, done = tmp_path / "starts", tmp_path / "done"
    once = python("import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(0.1)", str(starts))
    main = python(
        """
        import os, sys, time
        while not os.path.exists(sys.argv[1]) or os.path.getsize(sys.argv[1]) < 2:
            time.sleep(0.02)
        open(sys.argv[2], "w").close()
        """,
        str(starts), str(done),
    )  # fmt: skip
    with Supervisor(
        tmp_path / "logs", environment=ENVIRONMENT, limits=QUICK, finish_grace_s=2, tick_s=0.02, is_complete=done.exists
    ) as it:
        it.add(ChildSpec("producer", once, ends_itself=True))
        it.add(ChildSpec("learner", main, completes_run=True))
        outcome = it.run()
    assert outcome.end is End.COMPLETED
    assert it.children[0].restarts >= 1


def test_clients_are_stopped_before_servers(tmp_path: Path) -> None:
    order = tmp_path / "order"
    note = """
        import signal, sys, time
        def stop(*_):
            with open(sys.argv[1], "a") as file: file.write(sys.argv[2] + "\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        open(sys.argv[1] + "." + sys.argv[2], "w").close()
        time.sleep(600)
    """
    started = [tmp_path / "order.server", tmp_path / "order.client"]

    def when_started(supervisor: Supervisor) -> None:
        if all(path.exists() for path in started) and not supervisor.interrupted:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome, _ = run(
        tmp_path,
        ChildSpec("server", python(note, str(order), "server"), stop_order=1),
        ChildSpec("client", python(note, str(order), "client")),
        during=when_started,
    )
    assert (outcome.end, outcome.exit_code) == (End.INTERRUPTED, 143)
    assert order.read_text().split() == ["client", "server"]


def test_restarts_up_to_the_budget_then_stops_the_run_and_shows_why(tmp_path: Path) -> None:
    code = "import sys; print('start', file=sys.stderr); print('the disk is on fire', file=sys.stderr); sys.exit(75)"
    outcome, supervisor = run(tmp_path, ChildSpec("worker", python(code)), ChildSpec("other", SLEEP))
    assert (outcome.end, outcome.exit_code) == (End.FAILED, 75)
    assert outcome.line == "worker stopped the run: exit 75 (temporary), and 2 restarts within 60 s did not help"
    assert outcome.log_tail == ("start", "the disk is on fire")
    assert (tmp_path / "logs/worker.log").read_text().count("start") == 3
    assert supervisor.children[1].state is ChildState.STOPPED


def test_a_child_that_recovers_lets_the_run_complete(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        path = sys.argv[1]
        tries = int(open(path).read()) if os.path.exists(path) else 0
        open(path, "w").write(str(tries + 1))
        if tries == 0: os.kill(os.getpid(), signal.SIGKILL)
        if tries == 1: sys.exit(70)
    """
    outcome, supervisor = run(tmp_path, ChildSpec("main", python(code, str(tmp_path / "tries")), completes_run=True))
    assert outcome.end is End.COMPLETED
    assert supervisor.restarts == 2


@pytest.mark.parametrize("code", [2, 78])
def test_a_bad_configuration_is_not_tried_again_and_stops_everything(tmp_path: Path, code: int) -> None:
    script = f"import sys; print('anabranch: ConfigError: unknown key lerner', file=sys.stderr); sys.exit({code})"
    outcome, supervisor = run(
        tmp_path, ChildSpec("other", SLEEP), ChildSpec("learner", python(script), restart=Restart.ALWAYS)
    )
    assert (outcome.end, outcome.exit_code) == (End.FAILED, code)
    assert outcome.line.startswith(f"learner stopped the run: exit {code} (")
    assert outcome.log_tail == ("anabranch: ConfigError: unknown key lerner",)
    assert supervisor.restarts == 0


@pytest.mark.parametrize(("error", "named"), [("GateError", "gate"), ("CheckpointError", "checkpoint")])
def test_what_a_person_must_look_at_is_named_by_the_childs_own_error(tmp_path: Path, error: str, named: str) -> None:
    """All of them end with 78."""
    lines = f"anabranch: {error}: step 3, groups 0..3: loss = nan, not finite\nanabranch: another line"
    script = f"import sys; print({lines!r}, file=sys.stderr); sys.exit(78)"
    outcome, _ = run(tmp_path, ChildSpec("learner", python(script)))
    assert outcome.line == f"learner stopped the run: exit 78 ({named}); restarting would not help"


def test_a_program_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, ChildSpec("ghost", ("/nonexistent/program",)))
    assert outcome.end is End.FAILED
    assert "cannot be started" in outcome.line


def test_what_a_failed_child_had_started_dies_before_it_is_started_again(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        before = open(sys.argv[1]).read().split() if os.path.exists(sys.argv[1]) else []
        if any(os.path.exists(f"/proc/{pid}") and " Z " not in open(f"/proc/{pid}/stat").read() for pid in before):
            sys.exit(78)
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        with open(sys.argv[1], "a") as file: file.write(f"{child.pid}\\n")
        sys.exit(1)
    """
    pids = tmp_path / "pids"
    outcome, _ = run(tmp_path, ChildSpec("worker", python(code, str(pids))))
    assert outcome.end is End.FAILED
    assert outcome.exit_code == 1, "a grandchild was alive when its parent was started again"
    assert len(pids.read_text().split()) == 3


def test_a_child_that_ignores_sigterm_is_killed_after_the_deadline(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = python(
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)",
        str(ready),
    )
    waits = python("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)", str(ready))
    began = time.monotonic()
    outcome, supervisor = run(tmp_path, ChildSpec("deaf", deaf), ChildSpec("main", waits, completes_run=True))
    assert outcome.end is End.COMPLETED
    assert supervisor.children[0].state is ChildState.STOPPED
    assert supervisor.children[0].exit_code == -signal.SIGKILL
    assert 2 <= time.monotonic() - began < 30


def test_a_child_with_a_deadline_of_its_own_is_killed_sooner(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = python(
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)",
        str(ready),
    )
    waits = python("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)", str(ready))
    began = time.monotonic()
    with Supervisor(tmp_path / "logs", environment=ENVIRONMENT, stop_deadline_s=60, tick_s=0.02) as supervisor:
        supervisor.add(ChildSpec("deaf", deaf, stop_within_s=0.2))
        supervisor.add(ChildSpec("main", waits, completes_run=True))
        assert supervisor.run().end is End.COMPLETED
    assert time.monotonic() - began < 20


def test_a_grandchild_that_left_the_group_is_found(tmp_path: Path) -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(child.pid, flush=True)
    """
    run(tmp_path, ChildSpec("main", python(code), completes_run=True))
    assert not alive(int((tmp_path / "logs/main.log").read_text()))


def test_a_child_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    code = """
        import os, socket, sys, time
        if os.path.exists(sys.argv[1]): sys.exit(0)
        open(sys.argv[1], "w").close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.sendto(b"READY=1", chr(0) + os.environ["NOTIFY_SOCKET"][1:])
        time.sleep(600)
    """
    exits: list[str] = []
    outcome, supervisor = run(
        tmp_path,
        ChildSpec("main", python(code, str(tmp_path / "hung")), completes_run=True, watchdog_s=0.3),
        ChildSpec("never notifies", SLEEP, watchdog_s=0.3),
        during=lambda s: exits.append(s.children[0].last_exit),
    )
    assert outcome.end is End.COMPLETED
    assert [child.restarts for child in supervisor.children] == [1, 0]
    assert "hung for 0 s, killed" in exits


def test_a_killed_janitor_is_replaced(tmp_path: Path) -> None:
    first: list[int] = []

    def kill_it(supervisor: Supervisor) -> None:
        if not first:
            first.append(supervisor.cleanup.janitor_pid)
            os.kill(first[0], signal.SIGKILL)
        elif supervisor.cleanup.janitor_pid != first[0]:
            os.kill(os.getpid(), signal.SIGINT)

    outcome, _ = run(tmp_path, ChildSpec("main", SLEEP), during=kill_it)
    assert outcome.exit_code == 130


# The tests below need a supervisor of their own to kill: this script is it.
HOST = """
import json, os, sys
from pathlib import Path
from anabranch.deploy.child import ChildSpec, Restart
from anabranch.deploy.supervisor import Supervisor
root, python = Path(sys.argv[1]), sys.executable
with Supervisor(root / "logs", environment={"PATH": os.environ["PATH"]}, stop_deadline_s=float(sys.argv[2]), tick_s=0.02) as it:
    folder = it.folder("anabranch-test-")
    for name in ("tree", "deaf"):
        it.add(ChildSpec(name, (python, "-I", "-S", str(root / f"{name}.py"), str(root / name))))
    it.run_until(lambda: all((root / f"{n}.{k}").exists() for n, k in (("tree", "json"), ("deaf", "json"))), what="children", deadline_s=10)
    facts = {"folder": str(folder), "janitor": it.cleanup.janitor_pid, "children": [c.pid for c in it.children]}
    (root / "host.tmp").write_text(json.dumps(facts))
    os.rename(root / "host.tmp", root / "host.json")
    outcome = it.run()
sys.exit(outcome.exit_code)
"""
# Listens on a port; has one child in its group, one in a session of its own, and one with a scrubbed environment.
TREE = """
import json, os, socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
kids = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True), subprocess.Popen(sleep, env={})]
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump({"port": listener.getsockname()[1], "pids": [os.getpid(), *(kid.pid for kid in kids)]}, file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1] + ".json")
time.sleep(600)
"""
DEAF = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump({"pids": [os.getpid()], "fds": fds}, file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1] + ".json")
time.sleep(600)
"""


class Host:
    """A supervisor in a process of its own, with its tree running."""

    def __init__(self, root: Path, stop_deadline_s: float) -> None:
        (root / "tree.py").write_text(TREE)
        (root / "deaf.py").write_text(DEAF)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", HOST, str(root), str(stop_deadline_s)],
            start_new_session=True,
            env={**ENVIRONMENT, "TMPDIR": str(root)},
        )
        wait_for((root / "host.json").exists, "the supervisor to have started its children")
        self.facts = json.loads((root / "host.json").read_text())
        self.tree = json.loads((root / "tree.json").read_text())
        self.deaf = json.loads((root / "deaf.json").read_text())
        self.pids: list[int] = [*self.tree["pids"], *self.deaf["pids"]]

    def assert_nothing_is_left(self) -> None:
        wait_for(lambda: not alive(self.facts["janitor"]), "the janitor to end")
        assert [pid for pid in self.pids if alive(pid)] == []
        assert not Path(self.facts["folder"]).exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.tree["port"]), timeout=1)

    def close(self) -> None:
        """Whatever a failed test left."""
        for pid in [self.process.pid, self.facts["janitor"], *self.pids]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    it = Host(tmp_path, getattr(request, "param", 1.0))
    yield it
    it.close()


def test_kill_9_of_the_supervisor_leaves_no_process_port_or_folder(host: Host) -> None:
    assert all(alive(pid) for pid in host.pids)
    assert Path(host.facts["folder"]).is_dir()
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait()
    host.assert_nothing_is_left()


def test_children_die_with_the_supervisor_even_if_the_janitor_died_with_it(host: Host) -> None:
    os.kill(host.facts["janitor"], signal.SIGKILL)
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in host.facts["children"]), "the children to die")


def test_no_child_inherits_the_janitors_pipe_or_anything_else(host: Host) -> None:
    assert sorted(host.deaf["fds"]) == ["0", "1", "2"]


def test_ctrl_c_stops_everything_and_returns_130(host: Host) -> None:
    os.killpg(host.process.pid, signal.SIGINT)
    assert host.process.wait(timeout=15) == 130
    host.assert_nothing_is_left()


@pytest.mark.parametrize("host", [300.0], indirect=True, ids=["patient"])
def test_a_second_ctrl_c_kills_at_once(host: Host) -> None:
    os.kill(host.process.pid, signal.SIGINT)
    time.sleep(1.0)
    assert host.process.poll() is None, "a deaf child is being waited for"
    os.kill(host.process.pid, signal.SIGINT)
    assert host.process.wait(timeout=10) == 130
    host.assert_nothing_is_left()


def test_something_can_be_done_when_clients_are_gone_and_servers_are_not(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    supervisor = Supervisor(
        tmp_path / "logs",
        environment=ENVIRONMENT,
        between=lambda: seen.append([child.spec.name for child in supervisor.children if child.alive]),
        tick_s=0.02,
    )
    with supervisor:
        supervisor.add(ChildSpec("server", SLEEP, stop_order=1))
        supervisor.add(ChildSpec("client", SLEEP))
        supervisor.add(ChildSpec("main", python(""), completes_run=True))
        supervisor.run()
    assert seen == [["server"]]


def test_an_exception_in_the_tick_still_cleans_up(tmp_path: Path) -> None:
    pids: list[int] = []

    def broken(supervisor: Supervisor) -> None:
        pids.extend(child.pid for child in supervisor.children if child.pid)
        raise RuntimeError("the display broke")

    with pytest.raises(RuntimeError, match="the display broke"):
        run(tmp_path, ChildSpec("worker", SLEEP), during=broken)
    assert pids
    assert not any(alive(pid) for pid in pids)
