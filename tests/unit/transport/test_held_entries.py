"""What a consumer has in hand stays bounded by what is pending (transport/held_entries.py)."""

from __future__ import annotations

from anabranch.transport.held_entries import HeldEntries


def test_what_is_settled_is_forgotten_in_its_group_alone():
    held = HeldEntries()
    for group in ("learner", "recorder"):
        held.add(group, "a", ["1-1", "1-2"])
    held.add("learner", "b", ["1-3"])
    held.forget("learner", ["1-1", "1-3"])
    assert held.of("learner", "a") == {"1-2"}
    assert held.of("learner", "b") == set()
    assert held.of("recorder", "a") == {"1-1", "1-2"}
    held.forget_group("recorder")
    assert held.of("recorder", "a") == set()


def test_a_consumer_that_seems_to_hold_many_is_checked_at_every_doubling():
    held = HeldEntries(check_at=4)
    assert not held.add("g", "c", ["1-1", "1-2", "1-3"])
    assert held.add("g", "c", ["1-4"])
    held.keep("g", "c", {"1-2": 1, "1-4": 1, "1-9": 1})
    assert held.of("g", "c") == {"1-2", "1-4"}, "what it was never handed out is not held"
    assert not held.add("g", "c", ["1-5"])
    assert held.add("g", "c", ["1-6"])
    held.keep("g", "c", ["1-2", "1-4", "1-5", "1-6"])
    assert not held.add("g", "c", ["1-7", "1-8", "1-9"]), "all of them are pending: the next check is at eight"
    assert held.add("g", "c", ["1-10"])
    assert not held.add("g", "other", ["1-1"])


def test_doubt_is_of_one_consumer_until_it_is_resolved():
    held = HeldEntries()
    held.doubt("g", "c")
    assert held.is_unsure("g", "c")
    assert not held.is_unsure("g", "d")
    held.trust("g", "c")
    assert not held.is_unsure("g", "c")
