"""An apply in place that is killed anywhere: the same command again ends in the same bits, and leaves nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels
from anabranch.deploy.delta_merge import merge
from anabranch.kernels.delta_plan import plan_jobs
from tests.checkpoints import random_state, save, step

pytestmark = pytest.mark.process
COMMAND = [sys.executable, "-I", "-m", "anabranch.cli.main", "delta"]

# Ends the process (as kill -9 does: no cleanup, no buffers) at the n-th call that changes something on the disk, for every
# n there is, then applies again. What a write was doing when it was killed is half done. A second kill, at a random point of the
# second attempt, comes before the last one.
EVERYWHERE = """
import os, random, shutil, sys
from pathlib import Path
from anabranch.deploy.delta_apply import apply_in_place
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.transport.delta_file import DeltaFile

old, file, expected, threads = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
plan_jobs.__kwdefaults__["chunk_elements"] = 700
work = old.with_name("work")

def files(path):
    return {p.name: p.read_bytes() for p in (path.iterdir() if path.is_dir() else [path])}

def start():
    for path in list(old.parent.glob("*work*")) + list(old.parent.glob(".*work*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(old, work) if old.is_dir() else shutil.copy(old, work)

def apply():
    with DeltaFile(file) as delta:
        return apply_in_place(work, delta, threads=threads).how

def die_at(stop):
    calls = 0
    def fatal(name, real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == stop:
                if name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                os._exit(9)
            return real(*args, **options)
        return call
    for name in ("pwrite", "fsync", "rename", "unlink", "ftruncate", "open"):
        setattr(os, name, fatal(name, getattr(os, name)))

def killed_at(stop):
    child = os.fork()
    if child == 0:
        die_at(stop)
        apply()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

shutil.rmtree(work, ignore_errors=True)
points, how, rng = 0, set(), random.Random(0)
while True:
    points += 1
    start()
    killed = killed_at(points)
    if killed and points % 2:
        killed_at(rng.randrange(1, 60))
    how.add(apply())
    assert set(files(work).values()) == set(files(expected).values()), points
    assert files(work).keys() - {"work"} == files(expected).keys() - {"expected"}, (points, sorted(files(work)))
    assert not list(old.parent.glob(".*work*")), points
    if not killed:
        break
print(points, *sorted(how))
"""


def prepare(folder: Path, *, shards: int, stages: int = 1) -> None:
    """`old`, `expected` and the delta file `d` that leads from the one to the other."""
    states = [random_state()]
    for seed in range(stages):
        states.append(step(states[-1], seed=seed + 1))
        save(folder / f"s{seed}", states[-2])
        save(folder / f"s{seed + 1}x", states[-1])
        labels = Labels("r", 0, seed + 1, seed, learner_step=1)
        diff(folder / f"s{seed}", folder / f"s{seed + 1}x", folder / f"{seed}.delta", labels, threads=1)
    save(folder / "old", states[0], shards=shards)
    save(folder / "expected", states[-1], shards=shards)
    if stages > 1:
        merge([folder / f"{n}.delta" for n in range(stages)], folder / "d", base=None, threads=1)
    else:
        (folder / "0.delta").rename(folder / "d")


@pytest.mark.parametrize(("shards", "stages", "threads"), [(0, 1, 1), (3, 1, 1), (2, 2, 1), (3, 1, 3)])
def test_a_kill_at_any_write_is_made_good_by_the_same_command(
    tmp_path: Path, shards: int, stages: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 700)
    prepare(tmp_path, shards=shards, stages=stages)
    arguments = [str(tmp_path / "old"), str(tmp_path / "d"), str(tmp_path / "expected"), str(threads)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", EVERYWHERE, *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    points, *how = done.stdout.split()
    assert int(points) > 20, "the points are found"
    assert how == ["already", "changed", "finished"], "kills before, during and after the writing"


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """20 MB, so that a kill finds it at work."""
    old = {f"model.layers.{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(10)}
    save(tmp_path / "old", old, shards=2)
    save(tmp_path / "expected", step(old), shards=2)
    diff(tmp_path / "old", tmp_path / "expected", tmp_path / "d", Labels("r", 0, 1, 0, learner_step=1), threads=2)
    return tmp_path


# The command, which waits before the n-th of some calls that change the disk until its input is closed, and at last says how
# many there were.
AT_CALL = """
import itertools, os, sys
from anabranch.cli.main import main

stop, calls = int(sys.argv[1]), itertools.count(1)

def waiting(real):
    def call(*args, **options):
        if next(calls) == stop:
            print("waiting", flush=True)
            sys.stdin.read()
        return real(*args, **options)
    return call

for name in sys.argv[2].split(","):
    setattr(os, name, waiting(getattr(os, name)))
code = main(sys.argv[3:])
print(next(calls) - 1)
sys.exit(code)
"""


def at_call(
    stop: int, *arguments: str, calls: str = "ftruncate,pwrite,fsync,rename,unlink", folder: Path | None = None
) -> subprocess.Popen[str]:
    """`anabranch delta` with `arguments`, waiting at call number `stop`; 0: it does not wait."""
    command = [sys.executable, "-I", "-c", AT_CALL, str(stop), calls, "delta", *arguments, "--threads", "3"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_kill_9_while_threads_are_at_work(larger: Path) -> None:
    """Now at a certain call, now a moment after it; each attempt goes on where the one before was killed."""
    arguments = ["apply", str(larger / "old"), str(larger / "d"), "--in-place"]
    shutil.copytree(larger / "old", larger / "copy")
    with at_call(0, *arguments) as process:
        calls = int(process.communicate(timeout=60)[0].split()[-1])
    assert contents(larger / "old") == contents(larger / "expected")
    rng = random.Random(0)
    kills = 0
    for attempt in range(8):
        if contents(larger / "old") == contents(larger / "expected"):
            shutil.rmtree(larger / "old")
            shutil.copytree(larger / "copy", larger / "old")
        with at_call(rng.randrange(1, calls + 1), *arguments) as process:
            assert process.stdin is not None
            if process.stdout.readline() == "waiting\n":
                if attempt % 2:
                    process.stdin.close()
                    time.sleep(rng.uniform(0, 0.02))
                process.kill()
        kills += process.returncode == -9
    assert subprocess.run([*COMMAND, *arguments], timeout=60, check=False).returncode == 0
    assert contents(larger / "old") == contents(larger / "expected")
    assert kills, "the first attempt has a whole apply before it, and waits to be killed"


def test_at_once_they_do_not_mix(larger: Path) -> None:
    """The others are told to wait, or find the work done."""
    command = [*COMMAND, "apply", str(larger / "old"), str(larger / "d"), "--in-place"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(3)]
    told = [process.communicate(timeout=60)[1].decode() for process in processes]
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 75}, told
    assert 0 in codes
    assert all("wait for its end" in line for code, line in zip(codes, told, strict=True) if code)
    assert contents(larger / "old") == contents(larger / "expected")


@pytest.mark.parametrize("calls", ["ftruncate,pwrite,fsync", "fsync", "rename"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_leaves_nothing_half_made(
    larger: Path, number: signal.Signals, code: int, calls: str
) -> None:
    before = sorted(os.listdir(larger))
    commands = (
        ["apply", "old", "d", "-o", "out"],
        ["diff", "old", "expected", "-o", "e"],
        ["diff", "--anchor", "old", "-o", "a"],
    )
    for arguments in commands:
        with at_call(1, *arguments, calls=calls, folder=larger) as process:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(number)
            process.communicate(timeout=60)
        assert process.returncode == code
        for name in ("out", "e", "a"):  # a rename that was under way was ended
            path = larger / name
            assert calls == "rename" or not path.exists()
            if path.is_dir():
                assert contents(path) == contents(larger / "expected")
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        assert sorted(os.listdir(larger)) == before
