"""Reads the trajectory streams of all regions at once and hands out verified groups.

Invariant: every region has a thread of its own (`RegionReader`), so one that hangs, or is a long way off, costs the others
nothing; `poll` returns what has arrived and waits at most `block_ms`. Every delivery comes out of `poll` exactly once. A
region that refuses us (credentials, a key of the wrong type) is left out until it is mended; when all of them do, the next
`poll` says so, as it says what a region's thread dies of. Held by tests/unit/consumers/test_reader.py and
tests/unit/consumers/test_region_refuses.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from anabranch.consumers.arrivals import Opener, Polled
from anabranch.consumers.region_reader import Counted, RegionHealth, RegionReader
from anabranch.schemas.config import StreamSection
from anabranch.schemas.errors import AnabranchError
from anabranch.transport.stream import TrajectoryStream

Mark = Mapping[str, int]


class Reader:
    """One consumer of `group` over several regions. It begins to read at the first `poll`; `close` it.

    Args:
        vocabulary: number of token ids the model knows, see `Opener`.
        ledger_every_s: how often each region's ledger is read (None: never), see `counted`.
        clock: seconds, for pauses and claims; not for how long a call may wait.
    """

    def __init__(
        self,
        streams: Mapping[str, TrajectoryStream],
        *,
        run: str,
        group: str,
        consumer: str,
        config: StreamSection,
        vocabulary: int | None = None,
        ledger_every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition()
        self._config, self._clock = config, clock
        opener = Opener(run=run, config=config, vocabulary=vocabulary)
        self._regions = {
            name: RegionReader(
                name, stream, opener, group=group, consumer=consumer, config=config, changed=self._changed,
                clock=clock, ledger_every_s=ledger_every_s,
            )
            for name, stream in sorted(streams.items())
        }  # fmt: skip
        self._elsewhere: set[tuple[str, str]] = set()  # to be settled in regions that are not read
        self._started = False

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def now_s(self) -> float:
        """The clock that `counted` goes by."""
        return self._clock()

    def health(self) -> dict[str, RegionHealth]:
        with self._changed:
            return {name: region.health() for name, region in self._regions.items()}

    def unreachable(self) -> dict[str, str]:
        """Region -> why, for those that cannot be read now, `refusing` ones among them."""
        with self._changed:
            return {n: r.health().why for n, r in self._regions.items() if r.is_away}

    def refusing(self) -> dict[str, str]:
        """Region -> why, for those that answer and refuse us: somebody has to mend them."""
        with self._changed:
            return {n: str(r.refused) for n, r in self._regions.items() if r.refused is not None}

    def poll(self, *, block_ms: int) -> Polled:
        """What has arrived since the last call, in order within a region; waits up to `block_ms` for the first.

        Raises what a region's thread died of; and, when every region refuses us, an error of their kind that names each.
        """
        self._start()
        end = time.monotonic() + block_ms / 1000
        polled = Polled()
        with self._changed:
            self._check()
            while not any(region.has_something for region in self._regions.values()):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return polled
                self._changed.wait(left_s)
                self._check()
            for region in self._regions.values():
                region.take(polled)
            self._changed.notify_all()  # there is room again
        return polled

    def mark(self) -> Mark:
        """This moment, for `caught_up`."""
        self._start()
        with self._changed:
            return {name: region.fetches for name, region in self._regions.items()}

    def caught_up(self, mark: Mark) -> bool:
        """Whether everything that stood in the streams at `mark` has come out of `poll`, in every region that is not away."""
        with self._changed:
            self._check()
            return all(region.caught_up(mark[name]) for name, region in self._regions.items())

    def settle(self, region: str, fates: Sequence[tuple[str, str]]) -> None:
        """Acknowledge (entry id, fate) pairs as soon as `region` can be reached; returns at once. Those of a region that is
        not read (a checkpoint may know one that the configuration has no more) stay `unsettled`."""
        with self._changed:
            if region in self._regions:
                self._regions[region].settle(fates)
            else:
                self._elsewhere |= {(region, entry_id) for entry_id, _ in fates}

    def unsettled(self) -> set[tuple[str, str]]:
        """(region, entry id) of what `settle` was given and has not reached its stream."""
        with self._changed:
            here = {(name, entry_id) for name, region in self._regions.items() for entry_id in region.unsettled()}
            return here | self._elsewhere

    def flush(self, *, deadline_s: float) -> bool:
        """Wait until everything is settled where the region can be reached; False if it is not within `deadline_s`."""
        self._start()
        end = time.monotonic() + deadline_s
        with self._changed:
            while any(r.unsettled() and not r.is_away for r in self._regions.values()):
                self._check()
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def counted(self) -> dict[str, Counted]:
        """The last ledger read of each region that has answered."""
        with self._changed:
            return {name: region.counted for name, region in self._regions.items() if region.counted is not None}

    def close(self) -> None:
        """End the threads. Waits for the calls they are in, at most for a socket time-out."""
        for region in self._regions.values():
            region.close()
        with self._changed:
            self._changed.notify_all()
        if not self._started:
            return
        end = time.monotonic() + self._config.socket_timeout_ms / 1000 + 3
        for region in self._regions.values():
            region.join(max(0.1, end - time.monotonic()))

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for region in self._regions.values():
                region.start()

    def _check(self) -> None:
        for region in self._regions.values():
            if region.died_of is not None:
                raise region.died_of
        refused = [region.refused for region in self._regions.values()]
        errors = [error for error in refused if error is not None]
        if errors and len(errors) == len(refused):
            kinds = {type(error) for error in errors}
            kind = kinds.pop() if len(kinds) == 1 else AnabranchError
            raise kind("; ".join(dict.fromkeys(str(error) for error in errors))) from errors[0]
