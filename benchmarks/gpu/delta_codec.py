"""The delta codec's GPU kernels: whether they agree with the CPU's, then their speed beside a copy on the device.

    python benchmarks/gpu/delta_codec.py
    python benchmarks/gpu/delta_codec.py --dtype bf16 f32 --density 0.004 --json

Weights are drawn from a normal distribution, changes are single steps in the order of values at random places: the same
kind of data as a training step, not the same. A GB is 10^9 bytes of the weights, whatever a kernel reads or writes, so
figures compare with the copy's and with each other. What the CPU has to do in a call is timed too: starting kernels,
waiting, and for `encode` and `decode` the entropy stage, on one core.

It needs a CUDA device. With TRITON_INTERPRET=1 it runs without one, on a few thousand elements: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from anabranch.kernels import delta_sparse
from anabranch.kernels.delta_chunk import MAX_CHUNK_ELEMENTS, Piece, read_head
from anabranch.kernels.delta_dtypes import FORMS, BitForm
from anabranch.kernels.delta_scan import scan as cpu_scan
from anabranch.kernels.triton_bits import flat_bits, stepped, steps_between
from anabranch.kernels.triton_delta import DevicePart, decode_sparse, encode_sparse, group_changes
from anabranch.kernels.triton_locate import select
from anabranch.kernels.triton_ranks import class_directory, ranks
from anabranch.kernels.triton_scan import scan
from anabranch.schemas.layout import Layout

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f8_e4m3": torch.float8_e4m3fn}
CALLS = 10  # in a row between two looks at the clock


@dataclass(frozen=True)
class Step:
    """Weights before and after, as flat bits on the device."""

    dtype: str
    old: torch.Tensor
    new: torch.Tensor

    @property
    def form(self) -> BitForm:
        return FORMS[self.dtype]


def make_step(dtype: str, elements: int, density: float, device: str) -> Step:
    torch.manual_seed(elements)
    old = torch.empty(elements, dtype=DTYPES[dtype], device=device)
    for part in old.split(2**24):  # draws are float32
        part.copy_(torch.randn(part.numel(), device=device) * 0.02)
    bits = flat_bits(old)
    new = bits.clone()
    at = torch.randint(elements, (max(1, int(elements * density)),), device=device).unique()
    sign = torch.randint(2, (at.numel(),), device=device).to(bits.dtype) * 2 - 1
    new[at] = stepped(bits[at], sign, FORMS[dtype])
    return Step(dtype, bits, new)


def disagreement(step: Step) -> str | None:
    """Where the device's results differ from the CPU's for one chunk, or None."""
    n = step.old.numel()
    layout, piece = Layout.build([("w", step.dtype, (n,))]), Piece(0, 0, n)
    old, new = (t.cpu().numpy().view(step.form.uint) for t in (step.old, step.new))
    part = delta_sparse.Part(piece, old, new, *cpu_scan(old, new))
    there = DevicePart.compare(piece, step.old, step.new)
    if not np.array_equal(there.words, part.words):
        return "the changes that were found"
    chunk = delta_sparse.encode_sparse(layout, [part])
    if encode_sparse(layout, [there]) != chunk:
        return "the bytes of the chunk"
    found = step.old.clone()
    for segment, indices, bits in decode_sparse(read_head(layout, chunk), chunk, lambda p: step.old[p.start : p.stop]):
        found[indices + segment.start] = bits
    return None if torch.equal(found, step.new) else "the decoded weights"


def scan_disagreement(step: Step) -> str | None:
    """The same of an array of any size, by another library's kernel: the CPU would take its time."""
    equal = torch.equal(scan(step.old, step.new)[1], torch.nonzero(step.old != step.new).flatten())
    return None if equal else "the changes of the large array"


def kernels_of(step: Step) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed over one chunk, each with what it needs made before."""
    old, form = step.old, step.form
    n = old.numel()
    layout, piece = Layout.build([("w", step.dtype, (n,))]), Piece(0, 0, n)
    _, indices = scan(old, step.new)
    steps = steps_between(old[indices], step.new[indices], form)
    directory = class_directory(old, form)
    classes, places = ranks(old, indices, directory, form)
    chunk = encode_sparse(layout, [DevicePart.compare(piece, old, step.new)])
    head = read_head(layout, chunk)
    yield "directory", lambda: class_directory(old, form)
    yield "ranks", lambda: ranks(old, indices, directory, form)
    yield "select", lambda: select(old, classes, places, directory, form)
    yield "group", lambda: group_changes(old, indices, steps, form)
    yield "encode", lambda: encode_sparse(layout, [DevicePart.compare(piece, old, step.new)])
    yield "decode", lambda: decode_sparse(head, chunk, lambda p: old[p.start : p.stop])


def scans_of(step: Step) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "scan", lambda: scan(step.old, step.new)
    yield "torch.nonzero", lambda: torch.nonzero(step.old != step.new)


def median_s(run: Callable[[], Any], repeats: int, device: str) -> float:
    """Seconds of one call, after one that is not timed: it compiles."""
    wait, calls = (torch.cuda.synchronize, CALLS) if device == "cuda" else (lambda: None, 1)
    run()
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def measure(args: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """One row for each dtype, density, array and kernel. Ends the program if the GPU and the CPU disagree."""
    for dtype in args.dtype:
        for density in args.density:
            for elements, cases in ((args.scan_elements, scans_of), (args.elements, kernels_of)):
                step = make_step(dtype, elements, density, device)
                where = disagreement(step) if cases is kernels_of else scan_disagreement(step)
                if where:
                    raise SystemExit(f"delta_codec.py: {dtype} at density {density}: GPU and CPU differ in {where}")
                target = torch.empty_like(step.old)
                gb = step.old.numel() * step.form.width_bytes / 1e9
                copy_s = median_s(lambda step=step, target=target: target.copy_(step.old), args.repeats, device)
                for what, run in [("copy", None), *cases(step)]:
                    seconds = median_s(run, args.repeats, device) if run else copy_s
                    yield {
                        "dtype": dtype,
                        "density": density,
                        "elements": elements,
                        "what": what,
                        "gb_s": gb / seconds,
                        "of_copy": copy_s / seconds,
                        "equal_to": "CPU" if cases is kernels_of else "torch.nonzero",
                    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), metavar="DTYPE")
    parser.add_argument("--density", nargs="+", type=float, default=[0.004, 0.03], help="shares of changed elements")
    parser.add_argument("--elements", type=int, default=MAX_CHUNK_ELEMENTS, help="of the chunk that is coded")
    parser.add_argument("--scan-elements", type=int, default=2**28, help="of the array that is compared")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the median counts")
    parser.add_argument("--json", action="store_true", help="print a list with one object per row")
    args = parser.parse_args(argv)
    if not 1 <= args.elements <= MAX_CHUNK_ELEMENTS:
        parser.error(f"--elements: a chunk has 1 to {MAX_CHUNK_ELEMENTS}")
    if triton.knobs.runtime.interpret:
        device, name = "cpu", "Triton's interpreter: the figures say nothing about speed"
    elif torch.cuda.is_available():
        device, name = "cuda", torch.cuda.get_device_name()
    else:
        raise SystemExit("delta_codec.py: no CUDA device; this script measures kernels on a GPU")
    rows = measure(args, device)
    if args.json:
        print(json.dumps([{"device": name, **row} for row in rows], indent=1))
        return 0
    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'dtype':8} {'density':>8} {'elements':>11}  {'what':14} {'GB/s':>9} {'of copy':>8}")
    for row in rows:
        print(
            f"{row['dtype']:8} {row['density']:8.2%} {row['elements']:11,}  {row['what']:14} {row['gb_s']:9.2f} "
            f"{row['of_copy']:8.1%}"
        )
    print("All results are those of the CPU (the large scan: of torch.nonzero), bit for bit.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
