"""Our format in the benchmark is the one that `anabranch delta` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anabranch.deploy.codec_ours import Delta, Snapshot
from anabranch.deploy.codec_pair import load_pair
from anabranch.deploy.delta_diff import diff
from anabranch.deploy.delta_encode import Labels
from anabranch.kernels.workers import Workers
from tests.unit.deploy.step_pairs import base_tensors, write, write_pair


@pytest.mark.parametrize("kind", [Delta, Snapshot])
def test_its_size_is_that_of_the_file(tmp_path: Path, kind: type[Delta]) -> None:
    pair = load_pair(write_pair(tmp_path))
    for side, state in (("old", pair.base), ("new", pair.new)):
        write(tmp_path / side, {n: (d, shape, state[n]) for n, (d, shape, _) in base_tensors().items()})
    is_delta = kind is Delta
    labels = Labels("bench", 1, 1, 0 if is_delta else None, learner_step=1, published_ms=1_700_000_000_000)
    written = diff(tmp_path / "old" if is_delta else None, tmp_path / "new", tmp_path / "d", labels, threads=1)
    ours = kind(pair)
    encoded = ours.encode(*ours.prepare(pair.base, pair.new), Workers())
    assert ours.size_bytes(encoded) == written.size_bytes == (tmp_path / "d").stat().st_size
    decoded = ours.decode({name: bits.copy() for name, bits in pair.base.items()}, encoded, Workers())
    assert all(np.array_equal(decoded[name], bits) for name, bits in pair.new.items())
