"""The demo around stand-ins for the heavy processes: real servers, real supervision, real files.

The stand-ins speak the real contracts (metrics.jsonl, the hub's board, exit codes), so what is tested is everything
that the demo itself does. The real learner and producers run under it in tests/e2e/.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.deploy import janitor

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]

STAND_IN = """
import os, sys, time
from pathlib import Path
kind, *words = sys.argv[1:]
if kind == "model":
    print("step 1 of 2", *words, file=sys.stderr)
    print(words[words.index("--out") + 1])
    sys.exit(0)
from anabranch.schemas.config import load_config
from anabranch.schemas.metrics import *
from anabranch.transport.metrics_log import MetricsLog, read_records
from anabranch.transport.runtime import StopSignal, sd_notify
from anabranch.transport.wiring import connect_hub, connect_region
config = load_config(Path(words[words.index("--config") + 1]).read_text(), environ=os.environ)
stop = StopSignal().install()
now = lambda: time.time_ns() // 1_000_000
flag = config.run.directory / f"{kind}.fault"
if flag.exists():
    code = int(flag.read_text())
    if code != 78:
        flag.unlink()
    print("the stand-in has a fault", file=sys.stderr)
    sys.exit(code)
hub = connect_hub(config)
sd_notify("READY=1")
if kind == "learn":
    log = MetricsLog(config.run.directory)
    done = max((r.step for r in read_records(log.path) if isinstance(r, StepRecord)), default=0)
    evaluate = lambda v: log.append(EvaluationRecord(time_ms=now(), epoch=1, version=v, prompts=9, mean_reward=0.4 + v / 100, standard_error=0.01, temperature=1.0, seconds=1.0))
    assert hub.runs.finished() is None, "a producer that started before us would have ended"
    hub.runs.start()
    if not done:
        evaluate(0)
    total = config.learner.steps
    while done < total and not stop.wait(float(os.environ["STAND_IN_STEP_S"])):
        done += 1
        log.append(StepRecord(time_ms=now(), step=done, steps_total=total, epoch=1, version=done, reward_mean=0.5, reward_std=0.1, loss=0.0, grad_norm=1.0, lr=1e-4, groups=4, rollouts=16, tokens=100, zero_advantage_fraction=0.0, age_tokens={0: 50, 1: 50}, in_flight_age_mean=0.1, in_queue_age_mean=0.1, ratio_mean=1.0, ratio_max=1.2, kl_k1=0.0, kl_k3=0.0, ess_token=0.9, masked_fraction=0.0, kept_mass=1.0, wait_s=0.01, step_s=0.02, publish_s=0.01, delta_bytes=1000, full_bytes=100000, changed_fraction=0.01, queue_depth={"east": 1, "west": 2}, tokens_per_s={"east": 10.0, "west": 20.0}))
        hub.runs.report_learner(LearnerStatus(updated_ms=now(), state="waiting", waiting_for="a batch", step=done, steps_total=total, epoch=1, version=done))
    if done < total:
        log.append(NoteRecord(time_ms=now(), what="stopped"))
        sys.exit(0)
    evaluate(total)
    log.append(NoteRecord(time_ms=now(), what="finished"))
    hub.runs.finish("all steps done")
elif kind == "produce":
    region = words[words.index("--region") + 1]
    connect_region(config, region).ledger("learner")
    while hub.runs.finished() is None and not stop.wait(0.05):
        hub.runs.report_producer(f"{region}-0", ProducerStatus(updated_ms=now(), region=region, pid=os.getpid(), state="sampling", policy="e1.v1", swaps=2, last_swap_pause_ms=5.0, publish_to_serve_ms=50.0))
else:
    while hub.runs.finished() is None and not stop.wait(0.05):
        pass
    (config.run.directory / "recorded").write_text("everything")
"""
HOST = """
import sys
from anabranch.cli import main
from anabranch.deploy import topology
topology.program = lambda *words: (sys.executable, "-I", sys.argv[1], *words)
script, *words = sys.argv[1:]
sys.exit(main.main(words))
"""


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.05)


class Demo:
    """`anabranch demo` in a process of its own, in a folder with a space in its name."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a b"
        self.root.mkdir()
        self.run_dir = self.root / "runs/r"
        (self.root / "stand_in.py").write_text(STAND_IN)
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *words: str, step_s: float = 0.02, steps: int = 10, stdout: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root), "STAND_IN_STEP_S": str(step_s), "MPLCONFIGDIR": str(self.root),
            "TMPDIR": str(self.temporary), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", HOST, str(self.root / "stand_in.py"), "demo", "--name", "r", "--steps", str(steps), *words],
            cwd=self.root, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    @property
    def temporary(self) -> Path:
        path = self.root / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def steps_done(self) -> int:
        try:
            return (self.run_dir / "metrics.jsonl").read_text().count('"event":"step"')
        except OSError:
            return 0

    def processes(self, words: bytes = b"") -> list[int]:
        """Living processes of this test whose command line holds `words`: they name its folder in command line or
        environment, work in it, or hold a file of it (the janitor: the lock)."""
        mark, found = str(self.root), []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            place = Path("/proc", name)
            try:
                command, environment = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
                links = [os.readlink(place / "cwd"), *(os.readlink(fd) for fd in (place / "fd").iterdir())]
            except OSError:
                continue
            line = janitor.process_line(int(name))
            ours = mark.encode() in command + environment or any(link.startswith(mark) for link in links)
            if ours and words in command and line is not None and line.state not in "ZX":
                found.append(int(name))
        return found

    def assert_nothing_is_left(self) -> None:
        wait_for(lambda: not self.processes(), f"{self.processes()} to be gone", 10)
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    it = Demo(tmp_path)
    yield it
    it.close()


def test_a_whole_run(demo: Demo) -> None:
    process = demo.start("--set", "task.heldout_size=40", step_s=0.2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 11))
    assert lines[-1] == {"event": "result", "heldout_before": 0.4, "heldout_after": 0.5, "run_dir": "runs/r"}
    assert err.splitlines()[-1] == "held-out reward 0.400 ± 0.010 -> 0.500 ± 0.010 (9 prompts)  runs/r"
    config = tomllib.loads((demo.run_dir / "config.toml").read_text())
    assert config["model"]["path"] == str(demo.root / ".cache/anabranch/models/tiny")
    assert config["hub"]["url"].startswith("redis://:***@127.0.0.1:")
    assert sorted(p.name for p in (demo.run_dir / "plots").iterdir()) == [
        "age.png",
        "bytes.png",
        "drift.png",
        "ess.png",
        "reward.png",
        "time.png",
    ]
    summary = json.loads((demo.run_dir / "summary.json").read_text())
    assert (summary["completed"], summary["steps"], summary["swap_pause_ms_median"]) == (True, 10, 5.0)
    assert summary["ledger"] == {r: {"produced": 0, "foreign": 0, "pending": 0, "fates": {}} for r in ("east", "west")}
    assert set(summary["restarts"].values()) == {0}
    assert "--set task.heldout_size=40" in (demo.run_dir / "logs/model.log").read_text(), (
        "the warm start knows the task"
    )
    assert (demo.run_dir / "recorded").exists(), "the recorder was given time to end by itself"
    assert not (demo.run_dir / "redis").exists()
    demo.assert_nothing_is_left()
    again = demo.start("--set", "task.heldout_size=40")
    out, err = again.communicate(timeout=30)
    assert again.returncode == 0
    assert json.loads(out)["heldout_after"] == 0.5
    assert "complete already" in err


def test_on_a_terminal_there_is_a_screen_and_the_two_numbers_end_it(demo: Demo) -> None:
    master, slave = os.openpty()
    process = demo.start(step_s=0.2, stdout=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other side closed
        while data := os.read(master, 65536):
            shown += data
    os.close(master)
    assert process.wait(timeout=10) == 0
    text = shown.decode()
    assert "making the model" in text
    assert "step 10/10" in text
    assert "waiting for a batch" in text
    assert "e1.v1" in text
    assert '"event"' not in text
    assert text.endswith("held-out reward 0.400 ± 0.010 -> 0.500 ± 0.010 (9 prompts)  runs/r\r\n")


def test_ctrl_c_then_the_same_command_goes_on(demo: Demo) -> None:
    process = demo.start(step_s=0.2, steps=12)
    wait_for(lambda: demo.steps_done() >= 2, "two steps")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted by SIGINT at step" in err
    assert "go on with: anabranch demo --name r" in err
    demo.assert_nothing_is_left()
    assert not list(demo.run_dir.glob("redis/*/valkey.conf")), "passwords of servers that are gone"
    other = demo.start("--set", "learner.lr=0.5", steps=12)
    _, err = other.communicate(timeout=30)
    assert other.returncode == 78
    assert "learner.lr is 0.0001 there and 0.5 here" in err
    again = demo.start(steps=12)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert demo.steps_done() == 12


def test_kill_9_of_the_demo_leaves_nothing_and_the_next_goes_on(demo: Demo) -> None:
    process = demo.start(step_s=0.2, steps=12)
    wait_for(lambda: demo.steps_done() >= 2, "two steps")
    assert len(demo.processes()) >= 9  # demo, janitor, three servers, learner, two producers, recorder
    second = demo.start(steps=12)
    _, err = second.communicate(timeout=30)
    assert second.returncode == 75
    assert f"in use by another demo (pid {process.pid})" in err
    process.kill()
    process.wait()
    again = demo.start(steps=12)  # at once: it waits for the janitor
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    demo.assert_nothing_is_left()


def test_a_killed_learner_producer_and_server_are_started_again(demo: Demo) -> None:
    process = demo.start(step_s=0.25, steps=20)
    wait_for(lambda: demo.steps_done() >= 1, "a step")
    for words in (b"--region\0east", b"valkey-server", b"stand_in.py\0learn"):
        os.kill(demo.processes(words)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    restarts = json.loads((demo.run_dir / "run.json").read_text())["restarts"]
    assert restarts["learner"] >= 1
    assert restarts["producer-east"] >= 1
    assert sum(restarts[s] for s in ("hub", "redis-east", "redis-west")) == 1
    demo.assert_nothing_is_left()


def test_a_configuration_fault_of_a_child_ends_the_run_with_its_words(demo: Demo) -> None:
    demo.run_dir.mkdir(parents=True)
    (demo.run_dir / "produce.fault").write_text("78")
    process = demo.start(step_s=0.2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 78
    assert "  the stand-in has a fault" in err
    assert "stopped the run: exit 78 (configuration); restarting would not help" in err
    demo.assert_nothing_is_left()


def test_a_learner_that_was_only_asked_to_stop_is_no_completed_run(demo: Demo) -> None:
    process = demo.start(step_s=0.2, steps=50)
    wait_for(lambda: demo.steps_done() >= 1, "a step")
    (learner,) = demo.processes(b"stand_in.py\0learn")
    os.kill(learner, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "learner stopped before the run was complete" in err
    assert json.loads((demo.run_dir / "run.json").read_text())["completed"] is False


def test_a_run_killed_between_its_finish_and_the_end_of_the_demo_is_finished_by_the_next(demo: Demo) -> None:
    process = demo.start("--keep-redis", "--set", "hub.url=redis://:hunter2@127.0.0.1:1/0", steps=2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    run_file = demo.run_dir / "run.json"
    for file in (run_file, demo.run_dir / "summary.json", demo.run_dir / "summary.md"):
        assert "hunter2" not in file.read_text(), f"a password in {file.name}"
    run_file.write_text(run_file.read_text().replace('"completed": true', '"completed": false'))
    again = demo.start(steps=2)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads(run_file.read_text())["completed"] is True


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--producers", "0"), 2, "--producers 0"),
        (("--set", "lerner.lr=1"), 78, "unknown key lerner"),
        (("--config", "missing.toml"), 78, "cannot read --config missing.toml"),
        (("--set", "sampling.top_p=0.9"), 78, "top_p = 0.9 (must be 1.0)"),
    ],
)
def test_bad_input_is_one_clear_line_and_makes_no_folder(
    demo: Demo, words: tuple[str, ...], code: int, message: str
) -> None:
    process = demo.start(*words)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert not (demo.root / "runs").exists()
