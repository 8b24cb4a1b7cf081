"""The encoder's first pass on a GPU: which elements changed (compare and compact), as kernels/delta_scan.py `scan`.

Invariant: `scan` gives exactly the indices at which the bits differ, ascending, for tensors of any size: places are
64-bit from the first product on. Held by tests/gpu/test_delta_gpu.py.

Both arrays are read once. The first kernel leaves a bit for every element and a count for every block, an exclusive sum
of the counts says where each block writes, and the second kernel reads the bits (1/16 of one bf16 array) and writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton_bits import kernel, on_device_of

BLOCK = 4096  # elements a program compares: 8 to a byte of the marks


def scan(
    old: torch.Tensor, new: torch.Tensor, start: int = 0, stop: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `old` and `new` (`flat_bits` of one dtype, on one device) differ in [start, stop), without `stop` to the end.

    Returns:
        marks uint8 [8 · ⌈n / 64⌉], the words of the CPU's `scan` as bytes, lowest first: bit j of byte b is element
        8·b + j; and the indices of the differences, ascending, int64 [k]. Both count from `start`. Waits for the device
        once, to learn k.
    """
    stop = old.numel() if stop is None else stop
    assert old.dtype == new.dtype
    assert old.is_contiguous()
    assert new.is_contiguous()
    assert 0 <= start <= stop <= min(old.numel(), new.numel())
    size = stop - start
    blocks = triton.cdiv(size, BLOCK)
    marks = torch.empty(blocks * BLOCK // 8, dtype=torch.uint8, device=old.device)
    counts = torch.empty(blocks, dtype=torch.int64, device=old.device)
    if not blocks:
        return marks, counts
    with on_device_of(old):
        _compare[(blocks,)](old, new, start, size, marks, counts, BLOCK=BLOCK)
        ends = torch.cumsum(counts, 0)
        found = torch.empty(int(ends[-1]), dtype=torch.int64, device=old.device)
        _compact[(blocks,)](marks, ends - counts, found, BLOCK=BLOCK)
    return marks[: 8 * triton.cdiv(size, 64)], found


@kernel
def _compare(
    old: tl.tensor,
    new: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    marks: tl.tensor,
    counts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK // 8), tl.arange(0, 8)[None, :]
    lane = row[:, None] * 8 + column
    first = start + block * BLOCK
    inside = lane < size - block * BLOCK
    changed = tl.load(old + first + lane, inside, 0) != tl.load(new + first + lane, inside, 0)
    changed = changed.to(tl.int32)
    tl.store(marks + block * (BLOCK // 8) + row, tl.sum(changed << column, 1).to(tl.uint8))
    tl.store(counts + block, tl.sum(tl.sum(changed, 1), 0).to(tl.int64))


@kernel
def _compact(marks: tl.tensor, firsts: tl.tensor, found: tl.tensor, BLOCK: tl.constexpr) -> None:
    block = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK // 8), tl.arange(0, 8)[None, :]
    mark = tl.load(marks + block * (BLOCK // 8) + row).to(tl.int32)
    changed = (mark[:, None] >> column) & 1
    in_row = tl.sum(changed, 1)
    before = (tl.cumsum(in_row, 0) - in_row)[:, None] + tl.cumsum(changed, 1) - changed
    here = found + tl.load(firsts + block)
    tl.store(here + before, block * BLOCK + row[:, None] * 8 + column, changed != 0)
