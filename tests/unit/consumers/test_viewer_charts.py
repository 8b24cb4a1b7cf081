"""Charts and values of the viewer."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from anabranch.consumers.viewer.charts import MOST_POINTS, Chart, Series, bars, short, svg, thinned, ticks
from anabranch.consumers.viewer.formats import fate, number, percent, size, versions, when


def lines(chart: Chart) -> list[str]:
    tree = ElementTree.fromstring(str(svg(chart)))
    return [e.attrib["points"] for e in tree.iter() if e.tag.endswith("polyline")]


def test_a_line_goes_through_its_points():
    (line,) = lines(Chart("Reward", [Series("batch", [(0, 0.0), (10, 1.0)])]))
    assert line == "56.0,194.0 632.0,8.0"


def test_what_is_no_number_leaves_a_gap():
    points = [(0, 1.0), (1, None), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf)]
    assert len(lines(Chart("x", [Series("a", points)]))) == 3


def test_steps_hold_their_value():
    (line,) = lines(Chart("served", [Series("a", [(0, 1.0), (1, 2.0)])], steps=True))
    assert len(line.split()) == 3


@pytest.mark.parametrize("points", [[], [(0, None)], [(1, math.nan)]])
def test_without_values_it_says_so(points):
    assert "nothing recorded" in svg(Chart("Reward", [Series("a", points)]))


def test_one_value_and_a_flat_line_are_drawn():
    assert "<circle" in svg(Chart("x", [Series("a", [(3, 0.0)])]))
    assert lines(Chart("x", [Series("a", [(0, 5.0), (1, 5.0)])]))


def test_names_are_text():
    drawn = str(svg(Chart("<b>", [Series("<script>", [(0, 1.0), (1, 2.0)])]))) + str(bars("<i>", [("<script>", 2)]))
    assert "<script" not in drawn
    assert "<b>1" not in drawn
    assert "&lt;script&gt;" in drawn


def test_it_can_be_read_as_text():
    assert "Reward by step; last values: batch 0.5" in svg(Chart("Reward", [Series("batch", [(0, 0.25), (9, 0.5)])]))


def test_thinning_keeps_peaks_and_order():
    points = [(float(i), 0.0) for i in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    points[3] = (3.0, -4.0)
    few = thinned(points)
    assert len(few) <= MOST_POINTS + 2
    assert few == sorted(few)
    assert {9.0, -4.0} <= {y for _, y in few}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0, 40, [0, 10, 20, 30, 40]), (5, 5, [5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low, high, expected):
    found = ticks(low, high)
    assert found == pytest.approx(expected) or set(expected) <= {round(t, 6) for t in found}


def test_values_as_people_read_them():
    assert [short(v) for v in (0.25, 1500, 2_000_000, None, math.nan)] == ["0.25", "1.5k", "2M", "-", "-"]
    assert [size(v) for v in (None, 12, 1234, 5_000_000)] == ["-", "12 B", "1.23 kB", "5 MB"]
    assert [number(v) for v in (None, 1234567, 0.123456, math.inf)] == ["-", "1,234,567", "0.1235", "inf"]
    assert (percent(None), percent(0.5)) == ("-", "50.0%")
    assert (when(None), when(0), when(10**30)) == ("-", "1970-01-01 00:00:00.000", str(10**30))
    assert (fate(None), fate("dropped:age"), fate("trained")) == ("pending", "age", "trained")
    row = {"version_min": 3, "version_max": 5, "epoch_min": 1, "epoch": 2}
    assert [versions(row), versions(row | {"epoch": 1}), versions(row | {"version_min": None})] == [
        "e1.v3-e2.v5",
        "e1.v3-5",
        "-",
    ]
