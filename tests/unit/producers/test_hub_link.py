"""Permits, leases, evaluation shards and status: the engine's thread never waits, and is told no lie, whatever the hub does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from anabranch.producers.hub_link import HubLink
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.permits import Permit
from anabranch.transport.redis_boards import RedisEvaluationBoard, RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from tests.unit.producers.hub_lab import BATCH, LEASE_MS, V0, V1, Lab, granted, status, taken


def test_permits_come_as_far_as_wanted_and_lowest_first() -> None:
    lab = Lab()
    link = lab.link()
    link.want(3, V0)
    assert taken(link) == [], "nothing before the hub was asked"
    link.turn()
    assert taken(link, 2) == [0, 1]
    link.want(3, V0)
    link.turn()
    assert taken(link) == [2, 3, 4]
    link.turn()
    assert taken(link) == [5, 6, 7], "the bound: (S + v + 1)·B = 8"
    link.turn()
    assert taken(link) == []


def test_a_permit_knows_when_it_was_granted_however_late_it_is_started() -> None:
    lab = Lab()
    link = lab.link()
    link.want(2, V0)
    link.turn()
    lab.now_s += 3
    link.want(3, V0)
    link.turn()
    assert [(p.group_index, p.granted_ms) for p in link.take(9)] == [(0, 1_000_007), (1, 1_000_007), (2, 1_003_007)]


def test_nothing_is_asked_for_before_a_version_is_served() -> None:
    lab = Lab()
    link = lab.link()
    link.want(3, None)
    link.turn()
    assert taken(link) == []
    assert [p.group_index for p in lab.permits.take("other", max_groups=1, lease_ms=1)] == [0]


def test_a_permit_waits_until_the_version_it_asks_for_is_served() -> None:
    """max_age = 0: groups 4 to 7 must be sampled by version 1."""
    lab = Lab(max_age=0)
    link = lab.link()
    assert granted(lab, link, 8) == [0, 1, 2, 3]
    lab.permits.advance(1)
    assert link.wants_policy is None
    link.turn()
    assert taken(link) == []
    assert link.wants_policy == V1, "weights that stay old (a replica that shows an old head) have a reason to be seen"
    link.want(8, V1)
    assert link.wants_policy is None
    assert taken(link) == [4, 5, 6, 7]


def test_leases_are_kept_alive_until_a_group_is_released() -> None:
    lab = Lab(total=4)
    link = lab.link()
    assert granted(lab, link, 3) == [0, 1, 2]
    link.want(1, V0)
    link.turn()  # group 3 is granted and never started
    link.release(1)
    for _ in range(10):
        lab.now_s += LEASE_MS / 2000
        link.turn()
    other = lab.link("west-1")
    assert granted(lab, other, 100) == [1], "the released one has run out, all others are still held"
    assert link.lost() == set()


def test_a_renewal_that_failed_is_tried_again_at_once() -> None:
    lab = Lab()
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    lab.now_s += 0.9 * LEASE_MS / 1000
    renew, lab.permits.renew = lab.permits.renew, unreachable
    with pytest.raises(StreamUnavailableError):
        link.turn()
    lab.permits.renew = renew
    lab.now_s += 1
    link.turn()
    lab.now_s += 0.2 * LEASE_MS / 1000
    assert 0 not in granted(lab, lab.link("west-1"), 100)


def unreachable(*args: object, **kwargs: object) -> list[int]:
    raise StreamUnavailableError("lost the hub")


def test_after_an_outage_longer_than_the_lease_ones_own_groups_are_not_handed_out_anew() -> None:
    """Nobody else took them: the lease is renewed, and the engine must not be told to start a group that it runs."""
    lab = Lab()
    link = lab.link()
    assert granted(lab, link, 3) == [0, 1, 2]
    lab.now_s += 10 * LEASE_MS / 1000
    assert granted(lab, link, 2) == [3, 4]
    assert link.lost() == set()
    assert granted(lab, lab.link("west-1"), 100) == [5, 6, 7]


def test_a_machine_that_slept_does_not_start_its_groups_twice() -> None:
    """The hub's clock went on, the local one did not: renewal was not due, the leases had expired."""
    lab = Lab()
    link = lab.link(clock=lambda: 5.0)
    assert granted(lab, link, 3) == [0, 1, 2]
    lab.now_s += 10 * LEASE_MS / 1000
    assert set(granted(lab, link, 8)).isdisjoint({0, 1, 2})


def test_a_lease_that_went_to_somebody_else_is_told() -> None:
    lab = Lab()
    link, other = lab.link(), lab.link("west-1")
    assert granted(lab, link, 2) == [0, 1]
    lab.now_s += 2 * LEASE_MS / 1000
    assert granted(lab, other, 1) == [0]
    link.turn()
    assert link.lost() == {0}
    link.release(0)
    assert link.lost() == set()


def test_a_granted_group_whose_lease_was_lost_is_never_started() -> None:
    lab = Lab()
    link, other = lab.link(), lab.link("west-1")
    link.want(2, V0)
    link.turn()
    lab.now_s += 2 * LEASE_MS / 1000
    assert granted(lab, other, 2) == [0, 1]
    link.turn()
    assert not {0, 1} & set(taken(link))
    assert link.lost() == set(), "it was never started: there is nothing to abort"


def test_a_lost_group_that_comes_back_is_started_only_after_its_first_attempt_has_ended() -> None:
    lab = Lab(total=1)
    link, other = lab.link(), lab.link("west-1")
    assert granted(lab, link, 1) == [0]
    lab.now_s += 2 * LEASE_MS / 1000
    assert granted(lab, other, 1) == [0]
    lab.now_s += 2 * LEASE_MS / 1000  # the other dies too
    link.want(1, V0)
    link.turn()
    assert link.lost() == {0}
    link.turn()
    assert taken(link) == [], "the engine still runs attempt 0"
    link.release(0)
    (permit,) = link.take(1)
    assert (permit.group_index, permit.attempt) == (0, 2)
    link.want(0, V0)
    for _ in range(4):  # and the lease of the new attempt is kept alive
        lab.now_s += LEASE_MS / 2000
        link.turn()
    assert granted(lab, lab.link("north-1"), 1) == []
    assert link.lost() == set()


def test_an_evaluation_goes_shard_by_shard_and_its_result_to_the_board() -> None:
    lab = Lab()
    link = lab.link()
    lab.evaluations.request(V0, 2)
    link.want(0, V0)
    for shard in (0, 1):
        link.turn()
        assert link.take_evaluation() == (V0, shard, 2)
        link.turn()
        assert link.take_evaluation() is None, "one at a time"
        link.post_evaluation(V0, shard, {"rewards": [float(shard)]})
    link.turn()
    assert lab.evaluations.results(V0) == {0: {"rewards": [0.0]}, 1: {"rewards": [1.0]}}
    link.turn()
    assert link.take_evaluation() is None


def test_shards_of_another_version_are_left_alone() -> None:
    lab = Lab()
    link = lab.link()
    lab.evaluations.request(V1, 1)
    link.want(0, V0)
    link.turn()
    assert link.take_evaluation() is None
    link.want(0, V1)
    link.turn()
    assert link.take_evaluation() == (V1, 0, 1)


def test_a_shard_is_not_evaluated_with_weights_that_were_swapped_meanwhile() -> None:
    lab = Lab()
    link = lab.link()
    lab.evaluations.request(V0, 1)
    link.want(0, V0)
    link.turn()
    link.want(0, V1)
    assert link.take_evaluation() is None
    link.want(0, V0)
    lab.now_s += 120  # its lease has run out
    link.turn()
    assert link.take_evaluation() == (V0, 0, 1), "and nothing keeps it from another try"


def test_two_producers_share_the_shards() -> None:
    lab = Lab()
    links = [lab.link("east-1"), lab.link("west-1")]
    lab.evaluations.request(V0, 2)
    shards = []
    for link in links:
        link.want(0, V0)
        link.turn()
        shards.append(link.take_evaluation())
    assert shards == [(V0, 0, 2), (V0, 1, 2)]


def test_a_result_waits_for_the_hub() -> None:
    lab = Lab()
    link = lab.link()
    lab.evaluations.request(V0, 1)
    link.want(0, V0)
    link.turn()
    link.take_evaluation()
    link.post_evaluation(V0, 0, {"rewards": [1.0]})
    post, lab.evaluations.post = lab.evaluations.post, unreachable
    with pytest.raises(StreamUnavailableError):
        link.turn()
    lab.evaluations.post = post
    link.turn()
    assert lab.evaluations.results(V0) == {0: {"rewards": [1.0]}}


def test_status_is_reported_every_second_and_the_end_of_the_run_noticed() -> None:
    lab = Lab()
    link = lab.link()
    link.turn()
    assert lab.runs.producers() == {"east-1": status()}
    assert link.finished is None
    lab.runs.finish("all steps done")
    link.turn()
    assert link.finished is None, "not due yet"
    lab.now_s += 1.1
    link.turn()
    assert link.finished == "all steps done"


# With its thread.


class Sluggish:
    """A hub that answers late."""

    def surrender(self, producer: str, *, keep: Collection[int]) -> int:
        return 0

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        self.asked.set()
        assert self.answers.wait(60), "whoever was to let it answer waits for it"
        return [Permit(0, 0, V0)]

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        return []


def eventually(what: Callable[[], object], deadline_s: float = 15) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def opened() -> Iterator[list[HubLink]]:
    links: list[HubLink] = []
    yield links
    for link in links:
        link.close()
    assert not [t for t in threading.enumerate() if t.name == "hub-link"]


def test_the_engines_thread_never_waits_for_a_slow_hub(opened) -> None:
    lab, hub = Lab(), Sluggish()
    link = HubLink(hub, lab.runs, lab.evaluations, producer="p", lease_ms=LEASE_MS, poll_ms=1, status=status)
    opened.append(link)
    link.start()
    link.want(1, V0)
    assert hub.asked.wait(20)
    for _ in range(100):  # while the hub does not answer
        link.want(1, V0)
        assert link.take(0) == []
        link.take_evaluation()
        link.lost()
        link.release(99)
    hub.answers.set()
    eventually(lambda: taken(link) == [0])


def test_a_mistake_in_the_thread_ends_the_process_and_not_only_the_thread(opened) -> None:
    """Otherwise the producer would idle for ever and look alive."""
    lab = Lab()

    def broken() -> ProducerStatus:
        raise KeyError("a bug")

    link = HubLink(
        lab.permits, lab.runs, lab.evaluations, producer="p", lease_ms=LEASE_MS, poll_ms=1, status=broken
    )  # fmt: skip
    opened.append(link)
    link.start()
    eventually(lambda: "a bug" in link.error)
    with pytest.raises(KeyError, match="a bug"):
        link.want(1, V0)


def test_a_request_to_verify_arrives_and_the_last_word_is_how_it_ended(opened) -> None:
    lab = Lab()
    words = iter(["sampling", "draining"])
    last = ["sampling"]

    def told() -> ProducerStatus:
        last[0] = next(words, "done")
        return status().model_copy(update={"state": last[0]})

    link = HubLink(lab.permits, lab.runs, lab.evaluations, producer="p", lease_ms=LEASE_MS, poll_ms=1, status=told)
    opened.append(link)
    token = lab.runs.request_verification()
    link.start()
    eventually(lambda: link.verification == token)
    link.close()
    assert lab.runs.producers()["p"].state == last[0] != "sampling"


@pytest.mark.process
def test_a_hub_that_goes_away_and_comes_back(tmp_path: Path, keys: Keys, opened) -> None:
    """Over a real server: the groups in hand stay ours, the error is shown without the password, and work goes on."""
    with EmbeddedValkey(tmp_path / "hub") as hub:
        client = connect(hub.url, deadline_s=10, what="the hub")
        permits, runs, evaluations = (
            RedisPermits(client, keys), RedisRunBoard(client, keys), RedisEvaluationBoard(client, keys)
        )  # fmt: skip
        runs.start()
        permits.reset(epoch=1, version=0, batch=BATCH, max_age=0, total=100, accepted=())
        link = HubLink(permits, runs, evaluations, producer="p", lease_ms=LEASE_MS, poll_ms=5, status=status)
        opened.append(link)
        link.start()
        link.want(4, V0)
        got: list[int] = []
        eventually(lambda: got.extend(taken(link)) or len(got) == 4)
        hub.kill()
        eventually(lambda: link.error)
        assert hub.password not in link.error
        assert str(hub.port) in link.error
        assert taken(link) == []
        hub.start()
        permits.advance(1)
        link.want(4, V1)
        eventually(lambda: got.extend(taken(link)) or len(got) == 8)
        assert (sorted(got), link.lost()) == (list(range(8)), set())
        eventually(lambda: link.error == "")
        runs.finish("done")
        eventually(lambda: link.finished == "done")
        link.close()
        client.close()
