"""From two checkpoints to a delta file: what it holds, that it depends on nothing but them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.deploy.delta_apply import apply_to_new
from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels, WrittenDelta
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.producers.mirror import Mirror
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.delta_file import DeltaFile
from tests.checkpoints import State, load, random_state, raw, save, step
from tests.limits import file_size_limit

LABELS = Labels("r", 2, 7, 6, learner_step=7)
ANCHOR = Labels("r", 2, 7, None, learner_step=7)


def pair(folder: Path, *, shards: tuple[int, int] = (0, 0), share: float = 0.05) -> tuple[Path, Path]:
    old = random_state()
    return save(folder / "old", old, shards=shards[0]), save(folder / "new", step(old, share=share), shards=shards[1])


def made(old: Path | None, new: Path, out: Path, threads: int = 2) -> WrittenDelta:
    return diff(old, new, out, LABELS if old else ANCHOR, threads=threads)


@pytest.mark.parametrize("shards", [(0, 0), (1, 1), (3, 3), (0, 3), (3, 2)])
@pytest.mark.parametrize("jobs_of", [None, 100])
def test_applying_it_gives_the_new_state(
    tmp_path: Path, shards: tuple[int, int], jobs_of: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jobs_of:
        monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", jobs_of)
    old, new = pair(tmp_path, shards=shards)
    made(old, new, tmp_path / "d")
    with DeltaFile(tmp_path / "d") as delta:
        apply_to_new(old, delta, tmp_path / "out", force=False, threads=2)
    assert raw(load(tmp_path / "out")) == raw(load(new))


def edge_states() -> tuple[State, State]:
    """±0, NaN payloads, infinities, denormals, every pattern next to every other; and back."""
    patterns = torch.from_numpy(np.arange(2**16).astype(np.uint16).view(np.int16).copy())
    wide = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32).view(np.int32).copy())
    old = {
        "bf16": patterns.view(torch.bfloat16),
        "f16": patterns.clone().view(torch.float16),
        "f32": wide.view(torch.float32),
    }
    new = {name: t.flip(0) for name, t in old.items()}
    for state in (old, new):
        state["same"] = torch.tensor([float("nan"), -0.0, float("inf")])
    return old, new


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    old, new = edge_states()
    made(save(tmp_path / "old", old), save(tmp_path / "new", new), tmp_path / "d")
    with DeltaFile(tmp_path / "d") as delta:
        apply_to_new(tmp_path / "old", delta, tmp_path / "out", force=False, threads=1)
    assert raw(load(tmp_path / "out")) == raw(new)


def test_an_anchor_needs_no_old_state(tmp_path: Path) -> None:
    _, new = pair(tmp_path, shards=(0, 2))
    made(None, new, tmp_path / "d")
    with DeltaFile(tmp_path / "d") as delta:
        assert delta.header.manifest.kind == "anchor"
        apply_to_new(None, delta, tmp_path / "out.safetensors", force=False, threads=2)
    assert raw(load(tmp_path / "out.safetensors")) == raw(load(new))


def test_the_manifest_says_what_it_joins(tmp_path: Path) -> None:
    old, new = pair(tmp_path, shards=(1, 1))
    written = made(old, new, tmp_path / "d")
    assert written.size_bytes == (tmp_path / "d").stat().st_size
    with DeltaFile(tmp_path / "d") as delta:
        header, manifest = delta.header, delta.header.manifest
    assert header == written.header
    assert manifest.base is not None
    assert (manifest.base.digest, manifest.result_digest) == tuple(
        Mirror.from_checkpoint(p).digest() for p in (old, new)
    )
    assert (manifest.run, manifest.base.policy, manifest.version) == ("r", PolicyVersion(2, 6), 7)
    before, after = raw(load(old)), raw(load(new))
    widths = {t.name: t.size_bytes // max(t.numel, 1) for t in header.layout.tensors}
    for spec, changed in zip(header.layout.tensors, header.changed, strict=True):
        one, other = (
            np.frombuffer(s[spec.name], f"V{widths[spec.name]}" if spec.numel else "u1") for s in (before, after)
        )
        assert changed == int((one != other).sum())


@pytest.mark.parametrize("old", [True, False])
def test_the_same_states_give_the_same_file(tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads, the form of the checkpoints, or the time."""
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 100)
    before, after = pair(tmp_path)
    (tmp_path / "x").mkdir()
    sharded, _ = pair(tmp_path / "x", shards=(3, 1))
    files = set()
    for threads, first in ((1, before), (2, before), (5, sharded)):
        made(first if old else None, after, tmp_path / "d", threads)
        files.add((tmp_path / "d").read_bytes())
    assert len(files) == 1


def test_equal_states_give_an_empty_delta(tmp_path: Path) -> None:
    old, _ = pair(tmp_path)
    written = made(old, old, tmp_path / "d")
    assert written.header.manifest.changed_elements == 0
    assert written.header.manifest.chunks == ()
    with DeltaFile(tmp_path / "d") as delta:
        apply_to_new(old, delta, tmp_path / "out", force=False, threads=1)
    assert (tmp_path / "out").read_bytes() == old.read_bytes()


def test_a_model_without_tensors(tmp_path: Path) -> None:
    old = save(tmp_path / "old", {})
    made(old, old, tmp_path / "d")
    with DeltaFile(tmp_path / "d") as delta:
        apply_to_new(old, delta, tmp_path / "out", force=False, threads=1)
    assert (tmp_path / "out").read_bytes() == old.read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.norm.weight": torch.zeros(17, dtype=torch.bfloat16)}, r"'model\.norm\.weight' is bf16\[16\] in .*old"),
        ({"model.norm.weight": torch.zeros(16)}, r"f32\[16\] in .*new"),
        ({"another": torch.zeros(1)}, "'another' is not in .*old"),
    ],
)
def test_other_tensors_are_refused_with_the_first_difference(tmp_path: Path, change: State, told: str) -> None:
    old = save(tmp_path / "old", random_state())
    new = save(tmp_path / "new", {**random_state(), **change})
    with pytest.raises(DeltaError, match=told):
        made(old, new, tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    old, new = pair(tmp_path, share=1.0)

    def fill() -> None:
        with file_size_limit(1000):
            made(old, new, tmp_path / "d")

    with pytest.raises(OSError, match="too large"):
        fill()
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
