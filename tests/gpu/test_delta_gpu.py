"""The delta codec's GPU kernels against its CPU kernels: the same indices, the same chunk bytes, the same changes.

Skipped without a CUDA device; with TRITON_INTERPRET=1 in the environment they run under Triton's interpreter instead, on
any machine. tests/unit/kernels/test_triton.py does that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, read_head
from anabranch.kernels.delta_dtypes import FORMS, Bits
from anabranch.kernels.delta_scan import scan
from anabranch.kernels.delta_sparse import Changes, Part, decode_sparse, encode_sparse, group_changes
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from tests.property.delta_strategies import DTYPES, bit_arrays, changed, indices_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BORDERS = [1, 2, 63, 1023, 1024, 1025, 2048, 4095, 4096, 4097]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


@dataclass(frozen=True)
class Gpu:
    """The kernels, imported only here: without a GPU and the interpreter, importing Triton is of no use."""

    device: str
    delta: ModuleType
    scan: ModuleType
    bits: ModuleType

    def up(self, bits: Bits) -> torch.Tensor:
        return torch.tensor(bits.view(f"i{bits.itemsize}"), device=self.device)

    def down(self, bits: torch.Tensor) -> Bits:
        return bits.cpu().numpy().view(f"u{bits.element_size()}")

    def part(self, part: Part) -> Any:
        return self.delta.DevicePart.compare(part.piece, self.up(part.old), self.up(part.new))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no CUDA device (tests/unit/kernels/test_triton.py runs this under Triton's interpreter)")
    from anabranch.kernels import triton_bits, triton_delta, triton_locate, triton_ranks, triton_scan

    if INTERPRETED:  # some milliseconds for every program, however little it does: let each take more changes
        triton_ranks.GROUP = triton_locate.GROUP = 64
    return Gpu("cpu" if INTERPRETED else "cuda", triton_delta, triton_scan, triton_bits)


@st.composite
def changed_parts(draw: st.DrawFn) -> tuple[Layout, list[Part]]:
    """One to three tensors of one dtype, those left out in which nothing changed."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.one_of(st.integers(1, 2500), st.sampled_from(BORDERS)), min_size=1, max_size=3))
    layout = Layout.build([(f"t{i}", dtype, (n,)) for i, n in enumerate(sizes)])
    parts = []
    for i, n in enumerate(sizes):
        old = draw(bit_arrays(FORMS[dtype], n))
        new = draw(changed(FORMS[dtype], old))
        parts.append(Part(Piece(i, 0, n), old, new, *scan(old, new)))
    return layout, [p for p in parts if p.changed]


def listed(found: list[tuple[Piece, Any, Any]]) -> list[tuple[Piece, list[int], list[int]]]:
    return [(piece, indices.tolist(), bits.tolist()) for piece, indices, bits in found]


@given(changed_parts())
@settings(max_examples=25)
def test_chunks_have_the_bytes_of_the_cpu_path_and_decode_alike(gpu: Gpu, case: tuple[Layout, list[Part]]) -> None:
    layout, parts = case
    if not parts:
        return
    chunk = encode_sparse(layout, parts)
    assert gpu.delta.encode_sparse(layout, [gpu.part(p) for p in parts]) == chunk
    head = read_head(layout, chunk)
    old = {p.piece.tensor: p.old for p in parts}
    found = gpu.delta.decode_sparse(head, chunk, lambda p: gpu.up(old[p.tensor])[p.start : p.stop])
    assert all(indices.device == bits.device == gpu.up(parts[0].old).device for _, indices, bits in found)
    expected = decode_sparse(head, chunk, lambda p: old[p.tensor][p.start : p.stop])
    assert listed([(p, i, gpu.down(b)) for p, i, b in found]) == listed(expected)


@given(st.sampled_from(DTYPES), st.integers(0, 9000), st.data())
@settings(max_examples=25)
def test_scan_finds_what_differs_as_bits(gpu: Gpu, dtype: str, n: int, data: st.DataObject) -> None:
    old = data.draw(bit_arrays(FORMS[dtype], n))
    new = data.draw(changed(FORMS[dtype], old))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    there = gpu.up(old), gpu.up(new)
    for a, b, found in [(0, n, gpu.scan.scan(*there)), (start, stop, gpu.scan.scan(*there, start, stop))]:
        words, count = scan(old[a:b], new[a:b])
        marks, indices = found
        assert marks.cpu().numpy().view(np.uint64).tolist() == words.tolist()
        assert indices.tolist() == indices_of(words).tolist()
        assert indices.numel() == count


@pytest.mark.parametrize("how_many", ["none", "first", "last", "all"])
@pytest.mark.parametrize("n", BORDERS)
def test_sizes_around_blocks(gpu: Gpu, n: int, how_many: str) -> None:
    rng = np.random.default_rng(n)
    old = (rng.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    where = {"none": slice(0), "first": slice(1), "last": slice(n - 1, n), "all": slice(n)}[how_many]
    new = old.copy()
    new[where] ^= 1
    layout = Layout.build([("a", "bf16", (n,))])
    part = Part(Piece(0, 0, n), old, new, *scan(old, new))
    there = gpu.part(part)
    assert there.indices.tolist() == np.arange(n)[where].tolist()
    if how_many != "none":
        chunk = encode_sparse(layout, [part])
        assert gpu.delta.encode_sparse(layout, [there]) == chunk
        ((_, indices, bits),) = gpu.delta.decode_sparse(
            read_head(layout, chunk), chunk, lambda p: there.old[p.start : p.stop]
        )
        assert bits.tolist() == there.new[where].tolist()
        assert indices.numel() == there.indices.numel()


def test_unchanged_stretches_are_cut_alike(gpu: Gpu) -> None:
    layout = Layout.build([("a", "bf16", (9000,)), ("b", "bf16", (50,)), ("c", "bf16", (7000,))])
    rng = np.random.default_rng(5)
    parts = []
    for i, (n, stretches) in enumerate([(9000, [(0, 600), (5000, 5900)]), (50, [(7, 8)]), (7000, [(4000, 4500)])]):
        old = rng.integers(15000, 16000, n).astype(np.uint16)
        new = old.copy()
        for start, stop in stretches:
            new[start:stop] += rng.integers(0, 2, stop - start).astype(np.uint16)
        new[[a for a, _ in stretches]] ^= 1
        parts.append(Part(Piece(i, 0, n), old, new, *scan(old, new)))
    chunk = encode_sparse(layout, parts)
    head = read_head(layout, chunk)
    assert [p.tensor for p in head.pieces] == [0, 0, 1, 2]
    assert head.pieces[-1].start > 0
    there = [gpu.part(p) for p in parts]
    assert gpu.delta.encode_sparse(layout, there) == chunk
    new_there = [p.old.clone() for p in there]
    for piece, indices, bits in gpu.delta.decode_sparse(head, chunk, lambda p: there[p.tensor].old[p.start : p.stop]):
        new_there[piece.tensor][piece.start + indices] = bits
    assert all(torch.equal(found, part.new) for found, part in zip(new_there, there, strict=True))


@given(changed_parts())
@settings(max_examples=20)
def test_changes_are_grouped_alike(gpu: Gpu, case: tuple[Layout, list[Part]]) -> None:
    """Before segments are cut: ranks run on from piece to piece."""
    layout, parts = case
    if not parts:
        return
    form = FORMS[layout.tensors[0].dtype]
    starts = np.cumsum([0, *(p.piece.size for p in parts)])
    at = np.concatenate([indices_of(p.words).astype(np.int64) + start for p, start in zip(parts, starts, strict=False)])
    old, new = (gpu.up(np.concatenate([getattr(p, which) for p in parts])) for which in ("old", "new"))
    indices = torch.tensor(at, device=gpu.device)
    steps = gpu.bits.steps_between(old[indices], new[indices], form)
    found, expected = gpu.delta.group_changes(old, indices, steps, form), group_changes(layout, parts)
    for which in ("counts", "gaps", "steps"):
        a, b = getattr(found, which), getattr(expected, which)
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist()


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.data())
@settings(max_examples=25)
def test_any_gaps_are_found_or_refused_as_by_the_cpu(
    gpu: Gpu, dtype: str, gaps: list[int], data: st.DataObject
) -> None:
    form = FORMS[dtype]
    old = data.draw(bit_arrays(form, 1500))
    small = data.draw(st.booleans())
    each = np.array([g % 20 if small else g for g in gaps], np.uint32)
    drawn = data.draw(st.lists(st.integers(0, form.exponent_mask), min_size=each.size, max_size=each.size))
    counts = np.bincount(np.array(drawn), minlength=256).astype(np.int64)
    changes = Changes(counts, each, np.ones(each.size, form.uint))
    head = ChunkHead(ChunkKind.SPARSE, dtype, (Piece(0, 0, 700), Piece(1, 0, 800)), 0)

    def attempt(module: Any, old: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "read_changes", lambda *_: changes)
            try:
                return module.decode_sparse(head, b"", lambda p: old[700 * p.tensor : 700 * p.tensor + p.size])
            except DeltaError as error:
                return str(error)

    from anabranch.kernels import delta_sparse

    expected, found = attempt(delta_sparse, old), attempt(gpu.delta, gpu.up(old))
    if isinstance(expected, str):
        assert found == expected
    else:
        assert listed([(p, i, gpu.down(b)) for p, i, b in found]) == listed(expected)


@pytest.mark.parametrize("dtype", ["bf16", "f8_e5m2", "i64"])
@pytest.mark.parametrize("n", [1, 1000, 1024, 1025])
def test_the_last_element_is_found_and_none_after_it(gpu: Gpu, dtype: str, n: int) -> None:
    """All of class 0, which is what places beyond the end would look like."""
    form = FORMS[dtype]
    old = gpu.up(np.zeros(n, form.uint))
    counts = np.eye(1, 256, dtype=np.int64)[0]
    indices, bits = gpu.delta.locate(old, Changes(counts, np.array([n - 1], np.uint32), np.ones(1, form.uint)), form)
    assert (indices.tolist(), bits.tolist()) == ([n - 1], [1])
    with pytest.raises(DeltaError, match="1 of its 1 changes do not exist"):
        gpu.delta.locate(old, Changes(counts, np.array([n], np.uint32), np.ones(1, form.uint)), form)


@given(st.sampled_from(DTYPES), st.data())
@settings(max_examples=25)
def test_steps_lead_from_any_pattern_to_any_other(gpu: Gpu, dtype: str, data: st.DataObject) -> None:
    form = FORMS[dtype]
    old, new = (gpu.up(data.draw(bit_arrays(form, 200))) for _ in range(2))
    assert torch.equal(gpu.bits.stepped(old, gpu.bits.steps_between(old, new, form), form), new)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_flat_bits_are_the_memory_of_the_tensor(gpu: Gpu, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, device=gpu.device).to(dtype).requires_grad_(dtype == torch.float32)
    bits = gpu.bits.flat_bits(tensor)
    assert bits.shape == (tensor.numel(),)
    assert bits.element_size() == tensor.element_size()
    assert bits.data_ptr() == tensor.data_ptr()
    bits.zero_()
    assert not tensor.float().any()


def test_what_has_no_flat_bits_is_refused(gpu: Gpu) -> None:
    with pytest.raises(DeltaError, match=r"\[4, 6\] is not contiguous: copy it first"):
        gpu.bits.flat_bits(torch.zeros(6, 4).t())
    with pytest.raises(DeltaError, match="complex128"):
        gpu.bits.flat_bits(torch.zeros(3, dtype=torch.complex128))


# Beyond 2^31 elements: memory is asked for, but hardly any of it is touched.
FAR = 2**31


def test_scan_starts_beyond_what_32_bits_count(gpu: Gpu) -> None:
    old, new = (torch.empty(FAR + 6000, dtype=torch.int8, device=gpu.device) for _ in range(2))
    start = FAR - 5000
    old[start:], new[start:] = 0, 0
    new[[FAR - 4999, FAR - 1, FAR, FAR + 5999]] = 1
    assert gpu.scan.scan(old, new, start)[1].tolist() == [1, 4999, 5000, 10999]


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's programs can be told another number")
def test_places_of_late_blocks_do_not_wrap(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs on both sides of element 2^31, as if all before them had run."""
    from triton.runtime.interpreter import interpreter_builder

    block = gpu.scan.BLOCK
    before = FAR // block - 1
    size = FAR + block
    grid, number = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda *_: grid(before + 2, 1, 1))
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: number(before + x, y, z))
    old, new = (torch.empty(size, dtype=torch.int8) for _ in range(2))
    old[FAR - block :], new[FAR - block :] = 0, 0
    new[[FAR - 1, FAR, size - 1]] = 1
    marks = torch.empty(size // 8, dtype=torch.uint8)
    counts = torch.empty(before + 2, dtype=torch.int64)
    gpu.scan._compare[(2,)](old, new, 0, size, marks, counts, BLOCK=block)
    assert counts[before:].tolist() == [1, 2]
    firsts = torch.empty_like(counts)
    firsts[before:] = torch.tensor([0, 1])
    found = torch.empty(3, dtype=torch.int64)
    gpu.scan._compact[(2,)](marks, firsts, found, BLOCK=block)
    assert found.tolist() == [FAR - 1, FAR, size - 1]
