"""A spool lets go only of what every reading of the last seconds called settled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.producers.release_rule import ReleaseRule


def test_nothing_goes_before_a_reading_is_old_enough() -> None:
    rule = ReleaseRule(5.0)
    assert [rule.read(t, 10) for t in (0, 1, 2, 3, 4, 4.9)] == [0] * 6
    assert rule.read(5, 10) == 10


def test_the_lowest_of_the_last_readings_counts() -> None:
    rule = ReleaseRule(5.0)
    said = {0: 10, 1: 12, 2: 12, 3: 7, 4: 12, 5: 14, 6: 15, 7: 15, 8: 16, 9: 17, 10: 20}
    went = {t: rule.read(t, below) for t, below in said.items()}
    assert went == {**dict.fromkeys(range(5), 0), 5: 7, 6: 7, 7: 7, 8: 7, 9: 12, 10: 14}


def test_after_an_interruption_the_wait_begins_anew() -> None:
    """In between the server may have settled and forgotten: its last reading may be younger than what it can forget."""
    rule = ReleaseRule(5.0)
    rule.read(0, 10)
    assert rule.read(6, 10) == 10
    rule.interrupt()
    assert rule.read(100, 20) == 0
    assert rule.read(104, 20) == 0
    assert rule.read(105, 20) == 20


def test_without_a_delay_every_reading_counts_at_once() -> None:
    rule = ReleaseRule(0.0)
    assert [rule.read(t, below) for t, below in ((0, 3), (1, 5), (2, 4))] == [3, 5, 4]


@given(st.lists(st.tuples(st.floats(0.01, 3), st.integers(0, 50)), min_size=1, max_size=60), st.floats(0, 6))
def test_it_never_lets_go_of_more_than_the_definition_allows(steps: list[tuple[float, int]], after_s: float) -> None:
    rule, now, said = ReleaseRule(after_s), 0.0, []
    for pause, below in steps:
        now += pause
        said.append((now, below))
        went = rule.read(now, below)
        old = [i for i, (t, _) in enumerate(said) if t <= now - after_s]
        assert went == (min(b for _, b in said[old[-1] :]) if old else 0)
