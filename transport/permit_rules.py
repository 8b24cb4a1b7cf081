"""The arithmetic of permits that every implementation shares.

Invariant: `limit` is the capacity rule min((S + v + 1)·B, total), and a permit's minimum policy keeps the age of what
it produces within S at the step that can train it first. Held by tests/contract/test_permits.py.
"""

from __future__ import annotations

from collections.abc import Collection

from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.versions import PolicyVersion


def limit(version: int, *, batch: int, max_age: int, total: int) -> int:
    """First group index that may not be handed out while `version` is the learner's."""
    return min((max_age + version + 1) * batch, total)


def min_policy(group_index: int, *, epoch: int, version: int, batch: int, max_age: int) -> PolicyVersion:
    """Oldest policy that group `group_index` may be sampled by: it is trained at step max(g // B, version) at the
    earliest, whose weights must be at most `max_age` versions newer."""
    return PolicyVersion(epoch, max(0, max(group_index // batch, version) - max_age))


def ranges(indices: Collection[int]) -> list[tuple[int, int]]:
    """`indices` as ascending (start, end) pairs, end exclusive."""
    found: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def not_open(run: str) -> TemporaryError:
    """The learner advances permits that are not there: the hub has lost them."""
    return TemporaryError(
        f"the hub holds no permits of run {run!r}: it lost its data after the learner had opened the epoch; "
        "start the learner again, it restores them from its checkpoint"
    )


def taken_over(run: str, epoch: int, newer: int) -> ConfigError:
    return ConfigError(
        f"epoch {epoch} of run {run!r} hands out no permits: epoch {newer} is open, another learner works on this run; "
        "run one learner per run name"
    )
