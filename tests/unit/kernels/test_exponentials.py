import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.exponentials import exp_below

LOWEST = -87.3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worst_in_units(got: torch.Tensor, d: torch.Tensor) -> float:
    exact = torch.exp(d.double())
    unit = 2.0 ** (torch.floor(torch.log2(exact)) - 23)
    return float(((got.double() - exact).abs() / unit).max())


def test_every_distance_is_within_a_unit_and_a_half_of_exp() -> None:
    d = torch.linspace(LOWEST, 1e-3, 3_000_001)[None]
    got = d.clone()
    exp_below(got, torch.zeros(1), out=got)
    assert worst_in_units(got, d) < 1.5


def test_special_values() -> None:
    x = torch.tensor([[0.0, -0.0, -87.31, -1e4, -3e38, -math.inf, math.nan, 1e-30]])
    exp_below(x, torch.zeros(1), out=x)
    assert x[0, :6].tolist() == [1, 1, 0, 0, 0, 0]
    assert x[0, 6].isnan()
    assert x[0, 7] == 1


@given(st.integers(0, 5), st.integers(1, 70), st.floats(-1e4, 1e4, width=32))
def test_in_place_and_beside_are_the_same_and_leave_the_distance(rows: int, columns: int, top: float) -> None:
    g = torch.Generator().manual_seed(rows + 7 * columns)
    tops = torch.full((rows,), top)
    x = tops[:, None] - 30 * torch.rand(rows, columns, generator=g)
    distance = x - tops[:, None]
    beside, out = x.clone(), torch.empty_like(x)
    exp_below(beside, tops, out=out)
    exp_below(x, tops, out=x)
    assert torch.equal(x, out)
    assert torch.equal(beside, distance)
    torch.testing.assert_close(x, distance.exp(), rtol=3e-7, atol=0)


def test_float64_and_many_threads_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = -torch.rand(3, 4, dtype=torch.float64)
    top = torch.rand(3, dtype=torch.float64)
    expected = (x - top[:, None]).exp()
    exp_below(x, top, out=x)
    assert torch.equal(x, expected)
    x, top = -torch.rand(3, 4), torch.rand(3)
    expected = (x - top[:, None]).exp()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    exp_below(x, top, out=x)
    assert torch.equal(x, expected)
