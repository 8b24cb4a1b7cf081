"""Correctness 2, the engine's part: after any updates the live weights are the mirror's, and a bad update changes
nothing."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.producers.index_map import trace
from anabranch.producers.mirror import Mirror
from anabranch.schemas.errors import DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion
from tests.e2e.lab import Lab, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


def test_live_digest_equals_the_mirrors_after_many_sparse_swaps(lab: Lab) -> None:
    lab.begin(20)
    lab.submit(prompts(4, 16), max_tokens=60)
    seen = set()
    for k in range(12):
        report = lab.publish(fraction=(0.0, 0.001, 0.02, 0.7)[k % 4])
        assert lab.engine.policy == report.policy
        assert lab.engine.live_digest() == lab.mirror.digest()
        seen.add(lab.mirror.digest())
        lab.run(2)
    assert len(seen) >= 9


def test_dense_and_sparse_swaps_give_the_same_weights(lab: Lab) -> None:
    lab.begin(22)
    lab.publish(fraction=0.3, dense=True)
    assert lab.engine.live_digest() == lab.mirror.digest()


def test_one_bit_of_one_element_reaches_the_engine_in_every_tensor(lab: Lab) -> None:
    lab.begin(23)
    for spec in lab.mirror.layout.tensors:
        for index in (0, spec.numel - 1):
            where = np.array([index])
            lab.mirror.write(spec.name, where, lab.mirror.tensor_bits(spec.name)[where] ^ np.uint16(1))
            lab.engine.swap(lab.mirror, PolicyVersion(2, 1), {spec.name: where})
            assert lab.engine.live_digest() == lab.mirror.digest(), spec.name
    lab.publish(fraction=0.0)


def test_an_incomplete_change_list_is_seen_in_the_digest(lab: Lab) -> None:
    """The control: the live digest is of the live weights, not of what somebody said."""
    lab.begin(24)
    name = lab.mirror.layout.tensors[0].name
    lab.mirror.write(name, np.array([5]), lab.mirror.tensor_bits(name)[[5]] ^ np.uint16(1 << 7))
    lab.engine.swap(lab.mirror, PolicyVersion(2, 2), {})
    assert lab.engine.live_digest() != lab.mirror.digest()
    lab.engine.swap(lab.mirror, PolicyVersion(2, 3), {name: np.array([5])})
    assert lab.engine.live_digest() == lab.mirror.digest()


def _other_layout(layout: Layout, change: str) -> Layout:
    rows = [(t.name, t.dtype, t.shape) for t in layout.tensors]
    first, last = rows[0], rows[-1]
    return Layout.build(
        {
            "missing": rows[1:],
            "extra": [*rows, ("model.layers.9.mlp.up_proj.weight", "bf16", (4, 4))],
            "shape": [(first[0], first[1], (first[2][0] + 1, *first[2][1:])), *rows[1:]],
            "dtype": [*rows[:-1], (last[0], "f32", last[2])],
        }[change]
    )


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_a_mirror_of_another_layout_is_refused_and_the_old_weights_serve_on(lab: Lab, change: str) -> None:
    report = lab.begin(25)
    lab.submit(prompts(2, 16), max_tokens=20)
    done = lab.run(5)
    with pytest.raises(ModelMismatchError, match="tensor '"):
        lab.engine.swap(Mirror(_other_layout(lab.mirror.layout, change)), PolicyVersion(9, 9), {})
    assert lab.engine.policy == report.policy
    assert lab.engine.live_digest() == lab.mirror.digest()
    done |= lab.run()
    assert {s.policy for f in done.values() for s in f.spans} == {report.policy}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"nobody": None}, ModelMismatchError),
        ({"model.norm.weight": np.array([64])}, DeltaError),
        ({"model.norm.weight": np.array([-1])}, DeltaError),
        ({"model.embed_tokens.weight": np.array([259 * 64])}, DeltaError),
    ],
)
def test_a_bad_change_is_refused_before_the_first_write(
    lab: Lab, bad: dict[str, np.ndarray | None], error: type[Exception]
) -> None:
    lab.begin(26)
    report = lab.publish(fraction=0.5)
    before = lab.engine.live_digest()
    ahead = Mirror.from_checkpoint(lab.model_dir)  # other values everywhere: a partial write would show
    good = dict.fromkeys(n for n in lab.mirror.layout.by_name if n not in bad)
    with pytest.raises(error):
        lab.engine.swap(ahead, PolicyVersion(9, 9), good | bad)
    assert lab.engine.policy == report.policy
    assert lab.engine.live_digest() == before
    lab.publish()
    assert lab.engine.live_digest() == lab.mirror.digest()


def test_names_that_the_real_loader_does_not_know_are_refused(lab: Lab) -> None:
    model = _model(lab)
    layout = lab.mirror.layout
    assert set(trace(model, layout).copies) == set(layout.by_name)
    for name in ("model.layers.7.mlp.up_proj.weight", "model.stray.weight", "stray"):
        rows = [(t.name, t.dtype, t.shape) for t in layout.tensors]
        with pytest.raises(ModelMismatchError, match=name):
            trace(model, Layout.build([*rows, (name, "bf16", (8, 8))]))
    for spec in layout.tensors:
        fewer = [t for t in layout.tensors if t.name != spec.name]
        with pytest.raises(ModelMismatchError, match="come from no checkpoint tensor"):
            trace(model, Layout.build((t.name, t.dtype, t.shape) for t in fewer))


def test_a_tensor_that_the_loader_computes_is_reloaded_through_it(
    keep_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_lab.begin(30)
    engine, name = keep_lab.engine, "model.norm.weight"
    parameter = _model(keep_lab).get_parameter(name)
    monkeypatch.setattr(
        parameter, "weight_loader", lambda p, w: p.data.copy_(w.float().exp().log()), raising=False
    )  # fmt: skip
    try:
        engine._updates.ask("anabranch_init", model_dir=str(keep_lab.model_dir))
        keep_lab.mirror.write(name, np.array([3]), np.array([0x4000], np.uint16))  # 2.0
        keep_lab.engine.swap(keep_lab.mirror, PolicyVersion(2, 6), {name: np.array([3])})
        assert float(parameter.data[3]) == pytest.approx(2.0)
        with pytest.raises(ModelMismatchError, match=r"the loader computes 'model\.norm\.weight'"):
            engine.live_digest()
    finally:
        monkeypatch.undo()
        keep_lab.begin(30)
        engine._updates.ask("anabranch_init", model_dir=str(keep_lab.model_dir))
    assert engine.live_digest() == keep_lab.mirror.digest()


def test_live_values_that_no_checkpoint_can_hold_are_refused(lab: Lab) -> None:
    lab.begin(31)
    parameter = _model(lab).get_parameter("model.norm.weight")
    parameter.data[0] += 2**-20  # fits fp32, not bf16
    with pytest.raises(ModelMismatchError, match=r"live values of 'model\.norm\.weight' are not exact in bf16"):
        lab.engine.live_digest()
    lab.begin(31)
    assert lab.engine.live_digest() == lab.mirror.digest()


def test_the_map_is_small_and_padding_stays_zero(lab: Lab) -> None:
    model = _model(lab)
    index_map = trace(model, lab.mirror.layout)
    assert all(len(records) == 1 for records in index_map.copies.values())
    lab.begin(27)
    lab.publish(fraction=0.5)
    embedding = dict(model.named_parameters())["model.embed_tokens.weight"]
    assert embedding.shape[0] > 259
    assert not embedding[259:].any()
    assert sum(index_map.padding.values()) == sum(p.numel() for p in model.parameters()) - sum(
        t.numel for t in lab.mirror.layout.tensors
    )


def test_an_update_can_be_worked_out_beside_the_steps(lab: Lab) -> None:
    lab.begin(32)
    lab.submit(prompts(4, 16), max_tokens=60)
    lab.run(2)
    before = lab.engine.live_digest()
    policy, changed = lab.engine.policy, lab.change(fraction=0.3)
    following = PolicyVersion(2, 7)
    for _ in range(200):
        if lab.engine.prepare(lab.mirror, following, changed):
            break
        lab.run(1)
    assert lab.engine.prepare(lab.mirror, following, changed), "still so"
    assert (lab.engine.policy, lab.engine.live_digest()) == (policy, before), "nothing is written yet"
    lab.engine.swap(lab.mirror, following, changed)
    assert (lab.engine.policy, lab.engine.live_digest()) == (following, lab.mirror.digest())


def test_a_prepared_update_gives_way_to_another_and_is_refused_as_a_swap_is(lab: Lab) -> None:
    lab.begin(33)
    report = lab.publish()
    lab.engine.prepare(lab.mirror, PolicyVersion(2, 8), dict.fromkeys(lab.mirror.layout.by_name))
    changed = lab.change(fraction=0.1)
    lab.engine.swap(lab.mirror, PolicyVersion(2, 9), changed)
    assert lab.engine.live_digest() == lab.mirror.digest()
    bad: dict[str, np.ndarray | None] = {"model.norm.weight": np.array([64])}
    with pytest.raises(DeltaError):
        [lab.engine.prepare(lab.mirror, PolicyVersion(3, 0), bad) or time.sleep(0.01) for _ in range(1000)]
    assert lab.engine.policy == PolicyVersion(2, 9) > report.policy
    lab.publish()
    assert lab.engine.live_digest() == lab.mirror.digest()


def test_swap_reports_what_it_wrote(lab: Lab) -> None:
    lab.begin(28)
    name = "model.norm.weight"
    lab.mirror.write(name, np.array([1, 2, 3]), np.array([1, 2, 3], np.uint16))
    report = lab.engine.swap(lab.mirror, PolicyVersion(2, 4), {name: np.array([1, 2, 3])})
    assert (report.policy, report.elements, report.tensors) == (PolicyVersion(2, 4), 3, 1)
    assert 0 < report.pause_s < 5
    assert dataclasses.is_dataclass(report)


def test_many_swaps_hold_no_memory_and_no_descriptors(keep_lab: Lab) -> None:
    keep_lab.begin(29)

    def swap_often(times: int) -> None:
        for _ in range(times):
            keep_lab.engine.swap(keep_lab.mirror, PolicyVersion(2, 5), changed)

    # Both paths: half of the tensors whole, the others at a few positions.
    changed = {
        t.name: None if i % 2 else np.arange(0, t.numel, 50)
        for i, t in enumerate(keep_lab.mirror.layout.tensors)
    }  # fmt: skip
    swap_often(100)
    descriptors, resident = _open_descriptors(), _resident_bytes()
    swap_often(300)
    assert _open_descriptors() == descriptors
    assert _resident_bytes() - resident < 2 * keep_lab.mirror.layout.mirror_bytes, "less than three updates' worth"


def _model(lab: Lab) -> torch.nn.Module:
    model: torch.nn.Module = lab.engine._engine.model_executor.driver_worker.model_runner.get_model()
    return model


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
