"""The deepspeed program starts the learner's ranks: on one node by a hostfile, on two nodes in network namespaces of their own.

What they train is what one rank trains; exit codes come through; and no rank outlives the program, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.schemas.errors import EXIT_CONFIG, EXIT_TEMPORARY
from anabranch.transport.wiring import connect_hub
from tests.e2e import split_rank
from tests.links import slow_link
from tests.pipeline import Pipeline, pipeline
from tests.tiny import build_checkpoint
from tests.unit.learner.conftest import make_batch, save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
DEEPSPEED = [sys.executable, str(Path(sys.executable).with_name("deepspeed"))]
RANK = Path(split_rank.__file__)
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "DS_ACCELERATOR": "cpu"}
LEARN = """
[run]
name = "launched"
dir = "{root}/runs"
[model]
path = "{root}/model"
[task]
dataset = "count_bits"
question_pattern = "number (.*)"
answer_pattern = "([1-5])"
max_prompt_tokens = 16
[learner]
world_size = 2
zero_stage = 2
evaluate = false
[regions.east]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hostfile(folder: Path, *, slots: int) -> list[str]:
    """Arguments of the deepspeed program that have it start `slots` ranks here."""
    (folder / "hostfile").write_text(f"# one line a node\nlocalhost slots={slots}\n")
    where = ["--hostfile", str(folder / "hostfile"), "--no_ssh_check", "--master_addr", "127.0.0.1"]
    return [*where, "--master_port", str(free_port()), "--no_local_rank"]


def ended(process: subprocess.Popen[Any], deadline_s: float = 240.0) -> int:
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{process.args} does not end")


def running(marker: str) -> list[int]:
    """Processes with `marker` in their command line, this one aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if marker in words and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two steps of an objective that needs the ranks to agree, twice: with float32 weights, at stages 2 and 3."""
    folder = tmp_path_factory.mktemp("job")
    model = save_qwen3(folder / "model")
    batches = []
    for number, groups in enumerate((range(6), range(6, 9))):
        file = folder / f"{number}.npz"
        file.write_bytes(make_batch(groups).to_bytes())
        batches.append(str(file))
    learner = {"dtype": "float32", "lr": 1e-2, "eps": 1e-3, "micro_batch_tokens": 64}
    runs = {
        f"stage {stage}": {"learner": learner | {"zero_stage": stage}, "batches": batches, "correction": {"objective": "m2po"}}
        for stage in (2, 3)
    }  # fmt: skip
    return model, runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, job: tuple[Path, dict[str, Any]]) -> tuple[list[Any], np.ndarray]:
    out = tmp_path_factory.mktemp("alone") / "weights.npz"
    model, runs = job
    return split_rank.train(model, out, **runs["stage 2"]), values(out)


def values(file: Path) -> np.ndarray:
    with np.load(file) as bits:
        return np.concatenate([bits[name].view(np.float32).astype(np.float64) for name in sorted(bits.files)])


def written(folder: Path, job: tuple[Path, dict[str, Any]]) -> Path:
    model, runs = job
    (folder / "job.json").write_text(json.dumps({"model": str(model), "out": str(folder), "runs": runs}))
    return folder / "job.json"


def check(folder: Path, alone: tuple[list[Any], np.ndarray]) -> None:
    figures, weights = alone
    for run, report in json.loads((folder / "report.json").read_text()).items():
        for got, expected in zip(report, figures, strict=True):
            assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        np.testing.assert_allclose(values(folder / f"{run}.npz"), weights, rtol=0, atol=1e-5)
        assert json.loads((folder / f"{run}.sent-1.json").read_text())[1]["rows"], "rank 1 has worked"


def test_two_ranks_by_a_hostfile_train_what_one_trains(tmp_path: Path, job, alone):
    argv = [*DEEPSPEED, *hostfile(tmp_path, slots=2), str(RANK), str(written(tmp_path, job))]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=os.environ | QUIET, stdout=log, stderr=log)
        assert ended(process) == 0, (tmp_path / "log").read_text()[-3000:]
    check(tmp_path, alone)


def test_two_nodes_train_what_one_rank_trains(tmp_path: Path, job, alone):
    """The deepspeed program on each node, one rank each, over a link with 2 ms of round trip."""
    program = written(tmp_path, job)
    hosts = tmp_path / "hostfile"
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    with slow_link(rtt_ms=2.0, rate_mbit=1000.0, seconds=300.0) as link, (tmp_path / "log").open("wb") as log:
        processes = []
        for number, side in enumerate(("a", "b")):
            device = subprocess.run(
                ["ip", "-n", link.namespaces[side], "-j", "route", "get", "10.77.0.2" if side == "a" else "10.77.0.1"],
                capture_output=True, check=True,
            )  # fmt: skip
            name = json.loads(device.stdout)[0]["dev"]
            argv = [*DEEPSPEED, "--hostfile", str(hosts), "--no_ssh", "--node_rank", str(number)]
            argv += ["--master_addr", "10.77.0.1", "--no_local_rank", str(RANK), str(program)]
            environment = os.environ | QUIET | {"GLOO_SOCKET_IFNAME": name}
            processes.append(link.run(side, argv, env=environment, stdout=log, stderr=log))
        codes = [ended(process, 240.0) for process in processes]
        assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
        assert link.received_bytes("b") > 100_000, "gradients went over the link"
    check(tmp_path, alone)


@contextmanager
def launched(tmp_path: Path, *settings: str, slots: int = 2) -> Iterator[tuple[Pipeline, subprocess.Popen[bytes]]]:
    """`anabranch learn` with two ranks under the deepspeed program, over embedded servers; `settings`: --set."""
    build_checkpoint(tmp_path / "model", family="llama", tied=False)
    with pipeline(tmp_path, ["east"], LEARN.format(root=tmp_path)) as run, (tmp_path / "log").open("wb") as log:
        argv = [*DEEPSPEED, *hostfile(tmp_path, slots=slots), "--module", "anabranch.cli.main", "learn"]
        argv += ["--config", str(run.config_file), *(word for each in settings for word in ("--set", each))]
        process = subprocess.Popen(argv, env=os.environ | QUIET | run.environment, stdout=log, stderr=log)
        try:
            yield run, process
        finally:
            for pid in running(str(run.config_file)):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def test_a_deadline_of_rank_0_is_the_exit_code_of_the_program(tmp_path: Path):
    with launched(tmp_path, "learner.batch_deadline_s=1") as (_, process):
        assert ended(process) == EXIT_TEMPORARY, (tmp_path / "log").read_text()[-3000:]
        assert "gave up after" in (tmp_path / "log").read_text()


def test_a_wrong_number_of_slots_is_a_configuration_error(tmp_path: Path):
    with launched(tmp_path, slots=1) as (_, process):
        assert ended(process) == EXIT_CONFIG
    assert "learner.world_size = 2, but 1 ranks were started" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("how", ["SIGTERM to the program", "Ctrl-C", "SIGKILL to rank 1"])
def test_no_rank_outlives_the_program(tmp_path: Path, how: str):
    with launched(tmp_path) as (run, process):
        hub = connect_hub(run.config)
        end = time.monotonic() + 240
        while hub.channel.head() is None:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < end, "nothing is published"
            time.sleep(0.2)
        hub.close()
        everybody = running(str(run.config_file))
        assert len(everybody) == 4, "the program, its launcher, two ranks"
        if "rank 1" in how:
            (rank,) = [pid for pid in everybody if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
            os.kill(rank, signal.SIGKILL)
        elif how == "Ctrl-C":  # a terminal sends it to all of the group
            for pid in everybody:
                os.kill(pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        code = ended(process)
        end = time.monotonic() + 120
        while running(str(run.config_file)):
            assert time.monotonic() < end, "a rank outlived the program"
            time.sleep(0.2)
        if "rank 1" in how:
            assert code == 256 - signal.SIGKILL, "the code of the one that went first"
        else:
            assert "learner ends" in (tmp_path / "log").read_text(), "rank 0 stopped in order"
