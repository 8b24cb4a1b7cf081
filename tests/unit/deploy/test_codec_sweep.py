"""Synthetic steps follow the update law, and every sweep yields the rows it promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anabranch.cli.main import main
from anabranch.deploy.codec_sweep import DENSITIES, DTYPES, TENSOR_ELEMENTS, sweep, synthetic_step
from anabranch.kernels.delta_dtypes import FORMS, to_ordered
from anabranch.schemas.errors import UsageError


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_synthetic_step_changes_small_weights_first_and_mostly_by_one_place(dtype: str) -> None:
    layout, base, new = synthetic_step(dtype, 300_000, 0.02)
    (spec,) = layout.tensors
    form = FORMS[dtype]
    old, after = base[spec.name], new[spec.name]
    changed = old != after
    assert changed.mean() == pytest.approx(0.02, rel=0.1)
    exponent = (old >> form.uint(form.exponent_shift)) & form.uint(form.exponent_mask)
    assert exponent[changed].mean() < exponent.mean() - 1
    steps = to_ordered(after, form)[changed].astype(np.int64) - to_ordered(old, form)[changed].astype(np.int64)
    assert (np.abs(steps) == 1).mean() > 0.7


def test_large_states_are_split_into_tensors_and_repeat() -> None:
    layout, base, _ = synthetic_step("f8_e4m3", 5 * TENSOR_ELEMENTS + 3, 0.01)
    assert [t.numel for t in layout.tensors] == [TENSOR_ELEMENTS] * 5 + [3]
    assert np.array_equal(base["layers.0.weight"], base["layers.4.weight"])
    assert not np.array_equal(base["layers.0.weight"], base["layers.1.weight"])


@pytest.mark.parametrize(
    ("what", "count"), [("density", len(DENSITIES)), ("size", 1), ("dtype", len(DTYPES))]
)  # fmt: skip
def test_sweeps(what: str, count: int) -> None:
    rows = list(sweep(what, repeats=1, max_elements=10**6))
    assert len(rows) == count
    for row in rows:
        assert row.sweep == what
        header_bytes = 200
        assert row.bound < row.bytes_per_change < 1.05 * row.bound + header_bytes / (row.density * row.elements)
        assert min(row.encode_mb_s, row.decode_mb_s) > 0
    if what == "density":
        costs = [row.bytes_per_change for row in rows]
        assert costs == sorted(costs, reverse=True)  # rarer changes cost more each


@pytest.mark.parametrize("what", ["density", "size", "dtype"])
def test_a_limit_that_leaves_nothing_to_measure_is_a_usage_error(what: str) -> None:
    with pytest.raises(UsageError, match="--max-elements 10 "):
        list(sweep(what, repeats=1, max_elements=10))


def test_a_sweep_is_drawn_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "density.svg"
    command = ["bench", "codec", "--sweep", "dtype", "--max-elements", "100000", "--repeats", "1"]
    assert main([*command, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert all(dtype in printed for dtype in DTYPES)
    assert plot.read_text().startswith("<?xml")
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["dtype"] for row in rows] == list(DTYPES)
    assert set(rows[0]) >= {"bytes_per_change", "encode_mb_s", "decode_mb_s", "threads", "elements", "density"}
