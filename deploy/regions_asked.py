"""Asking the Redis of several regions at once, so that one that is away costs its own time only.

Invariant: every region asked is either among the answers or among those away, with the reason; anything else that goes wrong
(credentials, a bug) is raised. Held by tests/unit/deploy/test_regions_asked.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError, TemporaryError, UsageError

LOOK_DEADLINE_S = 10.0  # a person waits
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """Region -> answer, in the order of the names; `away`: region -> why there is none."""

    answers: dict[str, T] = field(default_factory=dict)
    away: dict[str, TemporaryError] = field(default_factory=dict)

    def end(self) -> None:
        """When all else has been shown: raises what kept regions from answering."""
        if len(self.away) == 1:
            raise next(iter(self.away.values()))
        if self.away:
            raise StreamUnavailableError("; ".join(str(error) for error in self.away.values()))


def ask_regions(names: Sequence[str], ask: Callable[[str], T]) -> Asked[T]:
    """`ask(name)` for each of `names`, all at the same time."""
    asked: Asked[T] = Asked()
    with ThreadPoolExecutor(max_workers=max(1, len(names)), thread_name_prefix="region") as pool:
        futures = [(name, pool.submit(ask, name)) for name in names]
        for name, future in futures:
            try:
                asked.answers[name] = future.result()
            except (StreamUnavailableError, BackpressureError) as error:
                asked.away[name] = error
    return asked


def regions_of(config: RunConfig, region: str | None) -> list[str]:
    """`region`, or all there are. Raises UsageError: no such region."""
    if region is None:
        return sorted(config.regions)
    if region not in config.regions:
        raise UsageError(f"--region {region}: the configuration has {', '.join(sorted(config.regions))}")
    return [region]


def impatient(config: RunConfig) -> RunConfig:
    """`config` for a command: not as patient as a process of a run is."""
    deadline_s = min(config.channel.connect_deadline_s, LOOK_DEADLINE_S)
    return config.model_copy(update={"channel": config.channel.model_copy(update={"connect_deadline_s": deadline_s})})
