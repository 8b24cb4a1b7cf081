import threading

import pytest

from anabranch.learner.beating import LEAST_S, SLOWEST_BYTES_PER_S, beating, file_deadline_s


def test_it_beats_during_the_call_and_not_after():
    beats, third = [], threading.Event()

    def heartbeat() -> None:
        beats.append(threading.current_thread().name)
        if len(beats) == 3:
            third.set()

    with beating(heartbeat, "a call", deadline_s=60, every_s=0.001):
        assert third.wait(30)
    count = len(beats)
    assert set(beats) == {"beating"}
    assert [t for t in threading.enumerate() if t.name == "beating"] == []
    assert len(beats) == count


def test_a_call_that_hangs_is_taken_for_hung_at_the_deadline():
    beats, over = [], threading.Event()
    before = threading.active_count()

    with beating(lambda: beats.append(1), "a call", deadline_s=0.05, every_s=0.001):
        while threading.active_count() > before:  # the thread gives up by itself, though the call goes on
            assert not over.wait(0.01)
        count = len(beats)
        over.wait(0.05)
        assert len(beats) == count >= 1


def test_a_failure_of_the_call_ends_it():
    with pytest.raises(OSError, match="full"), beating(lambda: None, "a call", deadline_s=60):
        raise OSError("full")
    assert [t for t in threading.enumerate() if t.name == "beating"] == []


def test_the_deadline_follows_from_the_bytes():
    assert file_deadline_s(0) == LEAST_S
    assert file_deadline_s(int(100 * SLOWEST_BYTES_PER_S)) == LEAST_S + 100
