"""Every format that ours is compared with gives back the exact bits, and its size is that of a complete file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.deploy import codec_packages
from anabranch.deploy.codec_packages import ArcV3, ZipNN
from anabranch.deploy.codec_peers import XOR_BLOCK_BYTES, Format, from_gaps, peers, split_runs, to_gaps
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.schemas.layout import Layout

Bits = np.ndarray[Any, Any]
needs_zipnn = pytest.mark.skipif(importlib.util.find_spec("zipnn") is None, reason="zipnn could not be built here")

LAYOUT = Layout.build([
    ("embed", "bf16", (300, 1000)), ("norm", "f32", (64,)), ("scale", "f32", ()), ("w8", "f8_e4m3", (40, 50)),
    ("w16", "f16", (33, 7)), ("ids", "i64", (5,)), ("flags", "bool", (3,)), ("none", "bf16", (0, 4)),
    ("alone", "bf16", (1,)), ("still", "bf16", (100,)),
])  # fmt: skip
UINT = {"bf16": np.uint16, "f16": np.uint16, "f32": np.uint32, "f8_e4m3": np.uint8, "i64": np.uint64, "bool": np.uint8}
EDGES = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x7F7F]
}  # ±0, ±inf, a NaN's payload, a denormal, the largest


def states(density: float, seed: int = 0) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Old and new bits of LAYOUT: weights of usual size, of which a share of `density` moved by a step or to an edge."""
    random = np.random.default_rng(seed)
    base: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for spec in LAYOUT.tensors:
        uint = UINT[spec.dtype]
        if spec.dtype == "bool":
            old = random.integers(0, 2, spec.numel).astype(uint)
            now = old ^ uint(1)
        else:
            weights = random.normal(0, 0.02, spec.numel).astype(np.float32)
            old = (
                (weights.view(np.uint32) >> 16).astype(uint)
                if uint == np.uint16
                else weights.view(np.uint32).astype(uint)
            )
            now = old + random.integers(1, 3, spec.numel).astype(uint)
            edges = np.array(EDGES.get(uint().itemsize, [0]), uint)
            odd = random.random(spec.numel) < 0.1
            now[odd] = random.choice(edges, spec.numel)[odd]
        moved = random.random(spec.numel) < density
        if spec.name == "still":
            moved[:] = False
        base[spec.name], new[spec.name] = old, np.where(moved, now, old)
    return base, new


def round_trip(codec: Format, base: dict[str, Bits], new: dict[str, Bits], threads: int) -> Any:
    """Encodes, decodes onto a copy of the base, and checks every bit; neither state is touched. Returns the encoded."""
    kept = {name: bits.copy() for name, bits in (base | {f"new {n}": b for n, b in new.items()}).items()}
    with Workers(threads) as workers:
        encoded = codec.encode(*codec.prepare(base, new), workers)
        decoded = codec.decode({name: bits.copy() for name, bits in base.items()}, encoded, workers)
    assert decoded.keys() == new.keys()
    for name, bits in new.items():
        assert decoded[name].dtype == bits.dtype
        assert np.array_equal(decoded[name], bits), name
        assert np.array_equal(base[name], kept[name]), "the base is only read"
        assert np.array_equal(bits, kept[f"new {name}"]), "the new weights are only read"
    return encoded


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("density", [0.0, 0.004, 0.5, 1.0])
@pytest.mark.parametrize("codec", peers(), ids=lambda codec: codec.name)
def test_peers_are_exact(codec: Format, density: float, threads: int) -> None:
    file = round_trip(codec, *states(density), threads)
    assert codec.size_bytes(file) == len(file)


@pytest.mark.parametrize("codec", peers(), ids=lambda codec: codec.name)
def test_a_flipped_byte_is_noticed(codec: Format) -> None:
    base, new = states(0.01)
    file = bytearray(codec.encode(base, new, Workers()))
    file[len(file) // 2] ^= 1
    with pytest.raises(DeltaError, match="digest"):
        codec.decode(base, bytes(file), Workers())


def test_int32_and_value_cost_six_bytes_a_change() -> None:
    base, new = states(0.2)
    changed = np.count_nonzero(base["embed"] != new["embed"])
    one = {"embed": base["embed"]}
    assert 0 < len(peers()[0].encode(one, {"embed": new["embed"]}, Workers())) - 6 * changed < 64


@pytest.mark.parametrize("codec", peers()[1:], ids=lambda codec: codec.name)
def test_zstd_pays_for_steps_of_one(codec: Format) -> None:
    """Compressed formats are well below 6 bytes on weights of which every 250th moved by one or two steps."""
    random = np.random.default_rng(1)
    old = (random.normal(0, 0.02, 1_000_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = np.where(random.random(old.size) < 0.004, old + 1, old).astype(np.uint16)
    assert len(codec.encode({"w": old}, {"w": new}, Workers())) < 4.2 * np.count_nonzero(old != new)


@given(st.lists(st.integers(0, 1 << 20), unique=True), st.lists(st.integers(0, 3), max_size=4))
def test_gaps_are_exact(positions: list[int], at_the_limit: list[int]) -> None:
    limits = np.cumsum([65535 * (k + 1) for k in at_the_limit]) + (1 << 20)
    at = np.array([*sorted(positions), *limits], np.int64)
    assert np.array_equal(from_gaps(to_gaps(at)), at)


@pytest.mark.parametrize("first", [0, 65534, 65535, 65536, 131070, 131071, 10**6])
def test_a_gap_longer_than_16_bits(first: int) -> None:
    """A filler costs two bytes and stands for 65535 passed elements."""
    gaps = to_gaps(np.array([first]))
    assert gaps.size == 1 + first // 65535
    assert from_gaps(gaps).tolist() == [first]


@pytest.mark.parametrize("runs", [1, 2, 7])
def test_runs_cover_every_element_once(runs: int) -> None:
    base, _ = states(0.0)
    seen = {name: np.zeros(bits.size, int) for name, bits in base.items()}
    for spans in split_runs(base, runs):
        assert len({base[span.name].dtype for span in spans}) == 1
        for name, start, stop in spans:
            seen[name][start:stop] += 1
    assert all(np.all(counts == 1) for counts in seen.values())


def test_dense_xor_spans_several_blocks() -> None:
    base, _ = states(0.0)
    assert base["embed"].nbytes > 3 * XOR_BLOCK_BYTES


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_arc_v3_is_exact(density: float, threads: int) -> None:
    round_trip(ArcV3(LAYOUT), *states(density), threads)


def test_arc_v3_is_measured_by_the_file_that_it_writes(tmp_path: Path) -> None:
    from fireworks_delta_compression import delta_compress_dicts_to_file

    codec = ArcV3(LAYOUT)
    base, new = codec.prepare(*states(0.01))
    file = tmp_path / "a delta"
    encoded = delta_compress_dicts_to_file(src=base, dst=new, diff_file=str(file), compression_format="arc_v3")
    assert codec.size_bytes(encoded) == file.stat().st_size


@needs_zipnn
@pytest.mark.parametrize("threads", [1, 2])
def test_zipnn_is_exact_and_its_input_stays_whole(threads: int) -> None:
    base, new = states(0.01)
    codec = ZipNN(LAYOUT)
    encoded = round_trip(codec, base, new, threads)  # type: ignore[arg-type]
    assert codec.size_bytes(encoded) < 0.9 * LAYOUT.payload_bytes


@pytest.mark.parametrize("package", [codec_packages.ARC_PACKAGE, codec_packages.ZIPNN_PACKAGE])
def test_a_missing_package_is_told_with_its_remedy(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=f"{package} is not installed: .*pip install .*{package}=="):
        codec_packages.require(package)
