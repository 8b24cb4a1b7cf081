"""Two ranks in processes of their own against one: same losses, same weights to rounding, same lifetime. And what they
publish, each its share, against the whole model gathered: the same digests, the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.kernels.delta_dtypes import uint_dtype
from anabranch.learner.launch import launch_ranks
from anabranch.learner.weights import tensor_bits
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import EXIT_TEMPORARY
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.wiring import connect_hub
from tests.e2e import learner_rank
from tests.publishers import apply, copy, digest_of
from tests.unit.learner.conftest import make_batch, save_qwen3, save_qwen3_moe

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
RANK = Path(__file__).with_name("learner_rank.py")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("batches")
    # The second has fewer rows with a gradient than ranks could share evenly; the third has none at all.
    made = [make_batch(range(3)), make_batch([5], samples=3), make_batch([6], reward=lambda s: 1.0), make_batch([7, 8])]
    files = [folder / f"{k}.npz" for k in range(len(made))]
    for file, batch in zip(files, made, strict=True):
        file.write_bytes(batch.to_bytes())
    return [str(file) for file in files]


def command(job: Path, **content: Any) -> list[str]:
    job.write_text(json.dumps({"what": "train"} | content))
    return [sys.executable, "-I", str(RANK), str(job)]


def results(out: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(out / "weights.npz") as weights:
        return json.loads((out / "report.json").read_text()), dict(weights)


def values(bits: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([bits[name].view(np.float32).astype(np.float64) for name in sorted(bits)])


FLOAT32 = {"dtype": "float32", "lr": 1e-3, "micro_batch_tokens": 48}
RESUMED = {1: {"zero_stage": 1, "lr": 1e-3}, 3: {"zero_stage": 3, "lr": 1e-3}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, batches: list[str]):
    """One rank, stage 1, float32, in this process."""
    out = tmp_path_factory.mktemp("alone")
    learner_rank.train(model_dir, str(out), {"zero_stage": 1} | FLOAT32, batches)
    return results(out)


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its experts are fused in the live model and separate in the checkpoint."""
    return save_qwen3_moe(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, moe_dir: Path, batches: list[str], valkey: EmbeddedValkey
) -> Path:
    """Two ranks: every stage in float32, published; stages 1 and 3 in bf16, straight, halfway, and resumed by new
    processes; a mixture of experts, published."""
    out = tmp_path_factory.mktemp("two ranks")

    def launch(*runs: dict[str, Any]) -> None:
        job = command(
            out / "job.json", model=str(model_dir), runs=[run | {"out": str(out / run["out"])} for run in runs]
        )
        assert launch_ranks(2, job, grace_s=5) == 0

    halfway = [
        {"out": f"half {k}", "learner": learner, "batches": batches[:2], "save_at": 2} for k, learner in RESUMED.items()
    ]
    launch(
        *(
            {"out": f"stage {k}", "learner": {"zero_stage": k} | FLOAT32, "batches": batches}
            | {"hub": valkey.url, "run": f"stage-{k}"}
            for k in range(4)
        ),
        *(
            {"out": f"moe {k}", "learner": {"zero_stage": k, "lr": 1e-3}, "batches": batches[:2]}
            | {"hub": valkey.url, "run": f"moe-{k}", "model": str(moe_dir)}
            for k in (1, 3)
        ),
        *({"out": f"straight {k}", "learner": learner, "batches": batches} for k, learner in RESUMED.items()),
        *halfway,
    )
    launch(*(run | {"batches": batches} for run in halfway))
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_what_one_trains(together: Path, alone, stage):
    expected, expected_weights = alone
    report, weights = results(together / f"stage {stage}")
    assert report["tokens"] == expected["tokens"]
    for figure in ("loss", "grad_norm", "kl_k3"):
        np.testing.assert_allclose(report[figure], expected[figure], rtol=1e-4, atol=1e-6)
    assert weights.keys() == expected_weights.keys()
    np.testing.assert_allclose(values(weights), values(expected_weights), rtol=0, atol=2e-5)


@pytest.mark.parametrize("run", ["stage-0", "stage-1", "stage-2", "stage-3", "moe-1", "moe-3"])
def test_what_ranks_publish_of_their_shares_is_the_whole_model_at_every_version(together: Path, valkey, run):
    report, weights = results(together / run.replace("-", " "))
    hub = connect_hub(load_config("", overrides=[f"hub.url={valkey.url}", f"run.name={run}"]))
    entries = hub.channel.index()
    versions = len(report["digests"])
    made = {(e.label, e.policy.version) for e in entries}
    steps = {("anchor", 0), *(("delta", v) for v in range(1, versions))}
    assert (
        steps
        <= made
        <= steps | {(f"skip{n}", v) for v in range(versions) for n in (2, 4)} | {("anchor", v) for v in range(versions)}
    )
    layout = hub.channel.layout(hub.channel.manifests([(PolicyVersion(1, 0), "anchor")])[0].layout_hash)
    states = {}
    for entry in entries:  # by every way that there is
        empty = {t.name: np.zeros(t.numel, uint_dtype(t.dtype)) for t in layout.tensors}
        state = empty if entry.base is None else copy(states[entry.base.version])
        apply(hub.channel, layout, entry, state)
        assert entry.digest == digest_of(layout, state) == report["digests"][entry.policy.version]
        states[entry.policy.version] = state
    assert {n: b.tobytes() for n, b in states[versions - 1].items()} == {n: b.tobytes() for n, b in weights.items()}
    assert report["digests"][0] != report["digests"][-1]
    hub.close()


@pytest.mark.parametrize("stage", RESUMED)
def test_two_ranks_resume_bit_for_bit(together: Path, stage):
    _, straight = results(together / f"straight {stage}")
    report, resumed = results(together / f"half {stage}")
    assert report["resumed"] == {"epoch": 3}
    assert len(report["loss"]) == 2
    assert {n: b.tobytes() for n, b in resumed.items()} == {n: b.tobytes() for n, b in straight.items()}


def test_two_ranks_export_one_model(together: Path):
    from anabranch.learner.policy import load_model

    for stage in (1, 3):
        out = together / f"straight {stage}"
        weights = load_model(out / "model", torch.bfloat16).state_dict()
        for name, bits in results(out)[1].items():
            assert np.array_equal(tensor_bits(weights[name]), bits)


def test_when_a_rank_fails_the_others_end_and_its_exit_code_is_ours(tmp_path: Path):
    started = time.monotonic()
    assert launch_ranks(3, command(tmp_path / "job.json", what="fail"), grace_s=0.5) == EXIT_TEMPORARY
    assert time.monotonic() - started < 60


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path):
    code = "import sys; from anabranch.learner.launch import launch_ranks; launch_ranks(2, sys.argv[1:])"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-c", code, *command(tmp_path / "job.json", what="hang", out=str(tmp_path))],
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    pids = [int(_read_when_there(tmp_path / f"pid-{rank}")) for rank in range(2)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    assert list(temporary.iterdir()) == [], "nor does a file"


def test_a_stop_signal_reaches_rank_0(tmp_path: Path):
    code = "import sys; from anabranch.learner.launch import launch_ranks; sys.exit(launch_ranks(2, sys.argv[1:], grace_s=0.5))"
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-c", code, *command(tmp_path / "job.json", what="hang", out=str(tmp_path))]
    )
    for rank in range(2):
        _read_when_there(tmp_path / f"pid-{rank}")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM


def _read_when_there(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)
    return path.read_text()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
