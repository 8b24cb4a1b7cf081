"""Verification finds what is wrong, alone, over the base and against the result, and writes nothing."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import torch

from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels, make_manifest
from anabranch.deploy.delta_merge import merge
from anabranch.deploy.delta_verify import verify
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.delta_file import DeltaHeader
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.schemas.layout import Layout
from anabranch.transport.delta_file import DeltaFile, DeltaWriter
from tests.checkpoints import random_state, save, step

LABELS = Labels("r", 0, 1, 0, learner_step=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 700)
    old = random_state()
    new = step(old)
    save(tmp_path / "old", old)
    save(tmp_path / "new", new, shards=2)
    save(tmp_path / "newer", step(new, seed=2))
    diff(tmp_path / "old", tmp_path / "new", tmp_path / "d", LABELS, threads=1)
    diff(tmp_path / "new", tmp_path / "newer", tmp_path / "e", LABELS, threads=1)
    diff(None, tmp_path / "new", tmp_path / "anchor", Labels("r", 0, 1, None, learner_step=1), threads=1)
    merge([tmp_path / "d", tmp_path / "e"], tmp_path / "de", base=None, threads=1)
    return tmp_path


def verified(folder: Path, file: str, *, base: str | None = None, result: str | None = None) -> list[str]:
    before = sorted(folder.rglob("*"))
    try:
        with DeltaFile(folder / file) as delta:
            return verify(
                delta, base=folder / base if base else None, result=folder / result if result else None, threads=2
            )
    finally:
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "base", "result", "lines"),
    [
        ("d", None, None, 2), ("d", "old", None, 4), ("d", None, "new", 3), ("d", "old", "new", 5),
        ("de", "old", "newer", 5), ("anchor", None, None, 3), ("anchor", None, "new", 4),
    ],
)  # fmt: skip
def test_what_is_right_passes(folder: Path, file: str, base: str | None, result: str | None, lines: int) -> None:
    assert len(verified(folder, file, base=base, result=result)) == lines


@pytest.mark.parametrize(
    ("file", "base", "result", "told"),
    [
        ("d", "new", None, "new has digest .*already what"),
        ("d", "newer", None, "newer has digest"),
        ("d", None, "old", "old has digest"),
        ("de", None, "new", "new has digest"),
        ("anchor", None, "old", "old has digest"),
    ],
)
def test_what_does_not_fit_is_told(folder: Path, file: str, base: str | None, result: str | None, told: str) -> None:
    with pytest.raises(DeltaError, match=told):
        verified(folder, file, base=base, result=result)


def test_another_model_is_told(folder: Path) -> None:
    save(folder / "other", {"a": torch.zeros(3)})
    for which in ({"base": "other"}, {"result": "other"}):
        with pytest.raises(DeltaError, match="another model"):
            verified(folder, "d", **which)


@pytest.mark.parametrize("base", ["old", "nobody"])
def test_an_anchor_has_no_base_to_check(folder: Path, base: str) -> None:
    with pytest.raises(UsageError, match=r"anchor is an anchor, which has no base: leave --base out"):
        verified(folder, "anchor", base=base)


def test_a_damaged_chunk_is_told(folder: Path) -> None:
    content = bytearray((folder / "d").read_bytes())
    content[-3] ^= 1
    (folder / "d").write_bytes(bytes(content))
    with pytest.raises(DeltaError, match="damaged"):
        verified(folder, "d")


def test_a_chunk_with_the_right_digest_and_the_wrong_structure_is_told(folder: Path) -> None:
    with DeltaFile(folder / "d") as delta:
        header = delta.header
        chunks = [delta.chunk(n) for n in range(len(header.manifest.chunks))]
    for position, chunk in enumerate(chunks):
        broken = [*chunks[:position], chunk[: len(chunk) // 2], *chunks[position + 1 :]]
        with DeltaWriter(folder / "broken") as writer:
            writer.add(broken)
            manifest = header.manifest.model_copy(update={"chunks": tuple(writer.chunks)})
            object.__setattr__(header, "manifest", manifest)
            writer.finish(header)
        with pytest.raises(DeltaError, match=f"broken: chunk {position}: "):
            verified(folder, "broken")


def test_counts_that_do_not_add_up_are_told(folder: Path) -> None:
    with DeltaFile(folder / "d") as delta:
        header = delta.header
        chunks = [delta.chunk(n) for n in range(len(header.manifest.chunks))]
    changed = (*header.changed[:-1], header.changed[-1] - 1) if header.changed[-1] else (header.changed[0] - 1, *header.changed[1:])  # fmt: skip
    object.__setattr__(header, "changed", changed)
    object.__setattr__(
        header, "manifest", header.manifest.model_copy(update={"changed_elements": sum(changed)})
    )  # fmt: skip
    with DeltaWriter(folder / "off") as writer:
        writer.add(chunks)
        writer.finish(header)
    with pytest.raises(DeltaError, match="its header says"):
        verified(folder, "off")


def test_a_missing_file_is_an_oserror_and_leaves_nothing_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        verified(folder, "nobody")
    with pytest.raises(FileNotFoundError):
        verified(folder, "d", base="nobody")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_model_that_is_only_declared_costs_nothing(tmp_path: Path) -> None:
    """32 TiB in 300 bytes: 8 million jobs, which nobody needs as long as no base is given."""
    layout = Layout.build([("a", "u8", (2**45,))])
    manifest = make_manifest(LABELS, layout, ("0" * 32, "1" * 32), (), 0)
    (tmp_path / "d").write_bytes(DeltaHeader(manifest, layout, (0,), (0,)).pack())
    tracemalloc.start()
    try:
        assert len(verified(tmp_path, "d")) == 2
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
