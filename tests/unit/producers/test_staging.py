"""Working out the writes of an update, on the small fused module of test_index_map.py."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from anabranch.producers.index_map import IndexMap, trace
from anabranch.producers.mirror import Mirror
from anabranch.producers.staging import Change, SharedMaps, Staging
from anabranch.producers.update_message import Changed, UpdateMemory
from anabranch.schemas.errors import AnabranchError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout
from tests.unit.producers.test_index_map import fused

CPU = torch.device("cpu")


class Bench:
    """A model, its map, and a mirror of random weights."""

    def __init__(self) -> None:
        self.model, self.layout = fused()
        self.map: IndexMap = trace(self.model, self.layout)
        self.mirror, self.memory, self.maps = Mirror(self.layout), UpdateMemory(), SharedMaps()
        self.rng = np.random.default_rng(0)
        self.shuffle(1.0)

    def shuffle(self, fraction: float) -> Changed:
        """New values at `fraction` of all places, which are returned."""
        changed: dict[str, np.ndarray | None] = {}
        for spec in self.layout.tensors:
            where = np.flatnonzero(self.rng.random(spec.numel) < fraction)
            bits = torch.randn(len(where)).bfloat16().view(torch.uint16).numpy()
            self.mirror.write(spec.name, where, bits)
            changed[spec.name] = where
        return changed

    def staging(self, changed: Changed, **other: object) -> Staging:
        told = self.memory.message(self.mirror, changed)
        rows = tuple(tuple(row) for row in told.pop("changed"))
        return Staging(Change(**{**told, "rows": rows, **other}), self.map, self.maps, CPU)  # type: ignore[arg-type]

    def expected(self) -> dict[str, torch.Tensor]:
        model, _ = fused()
        state = {
            s.name: torch.from_numpy(self.mirror.tensor_bits(s.name).copy()).view(torch.bfloat16).view(s.shape)
            for s in self.layout.tensors
        }
        model.load_weights(state.items())
        return dict(model.named_parameters())

    def holds_what_it_should(self) -> bool:
        expected = self.expected()
        rows = {"embed": self.layout.by_name["embed"].shape[0]}  # below them is padding
        return all(torch.equal(p[: rows.get(n)], expected[n][: rows.get(n)]) for n, p in self.model.named_parameters())


@pytest.mark.parametrize("background", [False, True])
def test_the_writes_take_the_model_to_the_mirror(background: bool) -> None:
    bench = Bench()
    everything = dict.fromkeys(bench.layout.by_name)
    for changed in (everything, bench.shuffle(0.3), bench.shuffle(0.01), {}):
        staging = bench.staging(changed)
        before = {n: p.clone() for n, p in bench.model.named_parameters()}
        if background:
            staging.start()
        writes = staging.result()
        assert staging.ready
        assert all(torch.equal(p, before[n]) for n, p in bench.model.named_parameters()), (
            "nothing is written by staging"
        )
        writes.write(bench.model.load_weights)
        assert bench.holds_what_it_should()


@pytest.mark.parametrize(
    ("changed", "other", "kind"),
    [
        ({"k": np.array([8])}, {}, DeltaError),
        ({"k": np.array([-1])}, {}, DeltaError),
        ({"q": None, "nobody": None}, {}, ModelMismatchError),
        ({"q": None}, {"layout_hash": "other"}, ModelMismatchError),
        ({"q": None}, {"mirror_path": "/nowhere"}, DeltaError),
        ({"q": None}, {"mirror_path": "/proc/self/exe.gone"}, DeltaError),
        ({"k": np.array([1])}, {"index_count": 10_000}, DeltaError),
        ({"k": np.array([1])}, {"rows": (("k", 1, 1),)}, DeltaError),
        ({"k": np.array([1])}, {"rows": (("k", -1, 1),)}, DeltaError),
        ({"k": np.array([1])}, {"rows": (("k", 0, -2),)}, DeltaError),
    ],
)
def test_what_is_wrong_with_an_update_refuses_all_of_it(
    changed: Changed, other: dict[str, object], kind: type[AnabranchError]
) -> None:
    bench = Bench()
    with pytest.raises(kind):
        bench.staging({"q": None, **changed}, **other).result()
    staging = bench.staging({"q": None, **changed}, **other)
    staging.start()
    with pytest.raises(kind):
        staging.result()


def test_an_update_that_is_given_up_stops_and_has_no_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    reached, go_on = threading.Event(), threading.Event()
    whole = Staging._whole

    def slow(self: Staging, *arguments: object) -> None:
        reached.set()
        assert go_on.wait(10)
        whole(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Staging, "_whole", slow)
    staging = bench.staging(dict.fromkeys(bench.layout.by_name))
    staging.start()
    assert reached.wait(10)
    assert not staging.ready
    threading.Timer(0.05, go_on.set).start()
    staging.give_up()
    assert staging.ready, "it waits until the memory is not used any more"
    with pytest.raises(AnabranchError, match="given up"):
        staging.result()


def test_memory_is_mapped_once_and_another_one_under_the_same_path_is_noticed() -> None:
    maps, first = SharedMaps(), Mirror(Layout.build([("w", "bf16", (4,))]))
    image = maps.get("mirror", first.path, 8)
    first.write("w", None, np.array([1, 2, 3, 4], np.uint16))
    assert maps.get("mirror", first.path, 8) is image
    assert image.view(np.uint16).tolist() == [1, 2, 3, 4], "the mapping shows what is written later"
    path = first.path
    first.close()
    second = Mirror(first.layout)
    if second.path != path:  # the descriptor's number is free: take it
        os.dup2(int(second.path.rsplit("/", 1)[1]), int(path.rsplit("/", 1)[1]))
    second.write("w", None, np.array([5, 6, 7, 8], np.uint16))
    assert maps.get("mirror", path, 8).view(np.uint16).tolist() == [5, 6, 7, 8]
    with pytest.raises(DeltaError, match="smaller"):
        maps.get("mirror", path, 1 << 20)
    if second.path != path:
        os.close(int(path.rsplit("/", 1)[1]))


def test_the_memory_of_indices_is_reused_and_updates_are_told_apart() -> None:
    bench = Bench()
    few, many = {"k": np.arange(3)}, {"k": np.arange(8), "v": np.arange(8)}
    first, second, third = (bench.memory.message(bench.mirror, c) for c in (many, few, many))
    assert first["index_path"] == second["index_path"] == third["index_path"]
    assert (first["index_count"], second["index_count"]) == (16, 3)
    assert len({m["update_id"] for m in (first, second, third)}) == 3
    assert second["changed"] == [["k", 0, 3]]
