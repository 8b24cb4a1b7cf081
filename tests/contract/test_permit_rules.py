"""Any order of what producers, learner and hub can do to permits: against a model, and as a run that must complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.schemas.errors import TemporaryError
from anabranch.transport import permit_rules
from anabranch.transport.permits import Permits
from tests.contract.permit_worlds import LONG_MS, reset, shift_clock, snapshot, take

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
INDEX = st.integers(0, 25)
SOME = st.lists(INDEX, max_size=4)
WHO = st.sampled_from("pqr")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), WHO, st.integers(1, 5)),
        st.tuples(st.just("clock"), st.just(""), st.sampled_from([-10, 2])),  # in leases
        st.tuples(st.just("renew"), WHO, SOME),
        st.tuples(st.just("give_up"), WHO, st.tuples(SOME, st.integers(0, 3), st.sampled_from([None, 1, 2]))),
        st.tuples(st.just("surrender"), WHO, SOME),
        st.tuples(st.just("settle"), st.just(""), SOME),
        st.tuples(st.just("give_back"), st.just(""), SOME),
        st.tuples(st.just("advance"), st.just(""), st.integers(0, 6)),
        st.tuples(
            st.just("reset"), st.integers(0, 4), st.tuples(st.sets(INDEX, max_size=10), st.sets(INDEX, max_size=2))
        ),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(actions=ACTIONS, batch=st.integers(1, 4), max_age=st.integers(0, 3), total=st.integers(1, 24))
def test_capacity_and_conservation_under_any_interleaving(make, actions, batch, max_age, total):
    """Nothing beyond the bound, no index with two holders, none forgotten."""
    permits = make()
    run = {"batch": batch, "max_age": max_age, "total": total}
    epoch, version = 1, 0
    reset(permits, epoch=epoch, **run)
    base = min((max_age + 1) * batch, total)
    next_new = 0
    held: dict[int, str] = {}
    failures: dict[int, int] = {}
    expired: set[int] = set()
    returned: set[int] = set()
    abandoned: set[int] = set()

    def forget(indices, *, failed: bool = True) -> None:
        for i in indices:
            held.pop(i, None)
            expired.discard(i)
            returned.discard(i)
            if failed:
                failures.pop(i, None)

    for kind, a, b in actions:
        if kind == "take":
            limit = permit_rules.raised(base, abandoned)
            free = sorted(i for i in returned | expired if i < limit)
            got = take(permits, b, a)
            assert got == (free + list(range(next_new, max(next_new, limit))))[:b]
            assert all(sum(j not in abandoned for j in range(i)) < base for i in got)
            next_new = max([next_new, *(i + 1 for i in got)])
            forget(got, failed=False)
            held |= dict.fromkeys(got, a)
        elif kind == "clock":
            shift_clock(permits, b * LONG_MS)
            expired |= held.keys()
        elif kind == "renew":
            mine = [i for i in b if held.get(i) == a]
            assert permits.renew(a, b, lease_ms=LONG_MS) == [i for i in b if i not in mine]
            expired -= set(mine)
        elif kind == "give_up":
            others, n, most = b
            indices = sorted(i for i, producer in held.items() if producer == a)[:n] + others
            for i in dict.fromkeys(i for i in indices if held.get(i) == a):
                forget([i], failed=False)
                failures[i] = failures.get(i, 0) + (most is not None)
                (abandoned if most is not None and failures[i] >= most else returned).add(i)
            assert permits.give_up(a, indices, max_attempts=most) == [i for i in indices if i in abandoned]
            failures = {i: n for i, n in failures.items() if i not in abandoned}
        elif kind == "surrender":
            mine = {i for i, producer in held.items() if producer == a and i not in b}
            assert permits.surrender(a, keep=b) == len(mine)
            forget(mine, failed=False)
            returned |= mine
        elif kind == "settle":
            permits.settle(b)
            for i in b:
                if next_new <= i < base + len(abandoned):
                    returned |= set(range(next_new, i)) - abandoned
                    next_new = i + 1
                forget([i])
        elif kind == "give_back":
            permits.give_back(b)
            forget(b, failed=False)
            returned |= {i for i in b if i < next_new} - abandoned
        elif kind == "advance":
            version = max(version, b)
            permits.advance(b)
            base = max(base, min((max_age + version + 1) * batch, total))
        else:
            epoch, version = epoch + 1, a
            accepted, skipped = b
            reset(permits, epoch=epoch, version=version, accepted=accepted, abandoned=skipped, **run)
            base = min((max_age + version + 1) * batch, total)
            next_new = max([next_new, *(i + 1 for i in accepted | skipped)])
            abandoned |= skipped
            forget(accepted | skipped)
            returned = set(range(next_new)) - accepted - held.keys() - abandoned
        state = permits.state()
        assert (state.next_index, state.returned, state.expired) == (next_new, len(returned), len(expired))
        assert sum(state.leased.values()) == len(held.keys() - expired)
        assert permits.abandoned() == abandoned
        assert (state.abandoned, state.limit) == (len(abandoned), permit_rules.raised(base, abandoned))


class Run:
    """Producers that do anything, a learner that keeps its own rules, a hub that may forget."""

    def __init__(self, permits: Permits, batch: int, max_age: int, steps: int) -> None:
        self.permits, self.batch, self.max_age, self.steps = permits, batch, max_age, steps
        self.epoch = self.version = 0
        self.trained: set[int] = set()
        self.queue: set[int] = set()
        self.stream: set[int] = set()  # arrived and not acknowledged
        self.skipped: set[int] = set()
        self.checkpoint = (0, frozenset[int](), frozenset[int]())
        self.running: dict[str, set[int]] = {name: set() for name in "pqr"}
        self.forget: Callable[[], None] | None = None
        self.restart()

    # Producers.
    def take(self, who: str, n: int) -> None:
        got = take(self.permits, n, who)
        gone = self.permits.abandoned()
        bound = min((self.max_age + self.version + 1) * self.batch, self.steps * self.batch)
        assert all(sum(j not in gone for j in range(i)) < bound for i in got), "beyond the age bound"
        self.running[who].update(got)

    def finish(self, who: str, n: int) -> None:
        for index in sorted(self.running[who])[:n]:
            self.running[who].discard(index)
            self.arrive(index)

    def give_up(self, who: str, n: int) -> None:
        given = sorted(self.running[who])[:n]
        self.running[who].difference_update(given)
        self.permits.give_up(who, given, max_attempts=1 + n % 2)

    def die(self, who: str, _: int) -> None:
        self.running[who].clear()

    def restart_producer(self, who: str, _: int) -> None:
        self.running[who].clear()
        self.permits.surrender(who)

    # Learner.
    def arrive(self, index: int) -> None:
        if index not in self.trained | self.queue | self.skipped:
            self.queue.add(index)
            self.stream.add(index)
        self.permits.settle([index])

    def drop_old(self, _: str, n: int) -> None:
        for index in sorted(self.queue)[:n]:
            self.queue.discard(index)
            self.stream.discard(index)
            self.permits.give_back([index])

    def step(self, *_: Any) -> None:
        self.skipped |= self.permits.abandoned() - self.queue - self.trained
        if len(self.queue) >= self.batch and self.version < self.steps:
            taken = sorted(self.queue)[: self.batch]
            assert not self.trained & set(taken)
            self.trained.update(taken)
            self.queue.difference_update(taken)
            self.version += 1
        try:
            self.permits.advance(self.version, epoch=self.epoch, abandoned=self.skipped)
        except TemporaryError:  # the hub forgot that this epoch was opened
            self.restart()

    def save(self, *_: Any) -> None:
        self.checkpoint = (self.version, frozenset(self.trained), frozenset(self.skipped))
        self.stream -= self.trained

    def restart(self, *_: Any) -> None:
        self.epoch += 1
        self.version, self.trained, self.skipped = self.checkpoint[0], set(self.checkpoint[1]), set(self.checkpoint[2])
        self.queue = self.stream - self.trained - self.skipped
        reset(
            self.permits, epoch=self.epoch, version=self.version, batch=self.batch, max_age=self.max_age,
            total=self.steps * self.batch, accepted=self.trained | self.queue, abandoned=self.skipped,
        )  # fmt: skip

    # Hub.
    def remember(self, *_: Any) -> None:
        self.forget = snapshot(self.permits)

    def amnesia(self, *_: Any) -> None:
        if self.forget is not None:
            self.forget()
            self.forget = None

    def clock(self, _: str, n: int) -> None:
        shift_clock(self.permits, (n - 3) * 5 * LONG_MS)


RUN_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [Run.take, Run.give_up] * 4 + [Run.finish] * 3 + [Run.step] * 3
            + [Run.die, Run.restart_producer, Run.drop_old, Run.save, Run.restart, Run.remember, Run.amnesia,
               Run.clock]
        ),
        WHO,
        st.integers(1, 5),
    ),
    max_size=80,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(actions=RUN_ACTIONS, batch=st.integers(1, 3), max_age=st.integers(0, 2), steps=st.integers(1, 6))
def test_whatever_happened_a_learner_completes_its_steps(make, actions, batch, max_age, steps):
    run = Run(make(), batch, max_age, steps)
    for act, who, n in actions:
        act(run, who, n)
    for _ in range(8 * steps + 8):  # from now on nothing fails, and what failed before has had its time
        if run.version == steps:
            break
        shift_clock(run.permits, 3 * LONG_MS)
        run.take("p", 100)
        run.finish("p", 100)
        run.step()
    assert run.version == steps, run.permits.state()
    assert len(run.trained) == steps * batch
