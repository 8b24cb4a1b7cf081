"""The arithmetic of permits that every implementation shares.

Invariant: `limit` is the capacity rule min((S + v + 1)·B, total), `raised` adds to it exactly what abandoned indices below it
leave free, and a permit's minimum policy keeps the age of what it produces within S at the step that can train it first.
Held by tests/contract/test_permits.py.
"""

from __future__ import annotations

from collections.abc import Collection

from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.versions import PolicyVersion

LONG = 2  # an expiry this many leases away was written before the clock stepped back

FAR = 100_000  # indices beyond the limit; more than a learner that went back to an older checkpoint finds queued


def limit(version: int, *, batch: int, max_age: int, total: int) -> int:
    """First group index that may not be handed out while `version` is the learner's and none is abandoned."""
    return min((max_age + version + 1) * batch, total)


def raised(limit: int, abandoned: Collection[int]) -> int:
    """The lowest bound with `limit` indices below it that are not abandoned."""
    bound = limit
    while bound < (wanted := limit + sum(index < bound for index in abandoned)):
        bound = wanted
    return bound


def plausible(accepted: Collection[int], limit: int) -> set[int]:
    """Without those that nobody can have been given (an entry may claim any index): all below them would be listed."""
    return {index for index in accepted if index < limit + FAR}


def min_policy(group_index: int, *, epoch: int, version: int, batch: int, max_age: int, skipped: int) -> PolicyVersion:
    """Oldest policy that group `group_index` may be sampled by: it is trained at step max((g − skipped) // B, version)
    when nothing is late, whose weights must be at most `max_age` versions newer. `skipped`: abandoned indices below g."""
    return PolicyVersion(epoch, max(0, max((group_index - skipped) // batch, version) - max_age))


def ranges(indices: Collection[int]) -> list[tuple[int, int]]:
    """`indices` as ascending (start, end) pairs, end exclusive."""
    found: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def check_open(run: str, *, asked: int | None, open_epoch: int | None) -> None:
    """Raises what `Permits.advance` of epoch `asked` raises while `open_epoch` is open."""
    if not open_epoch or (asked is not None and open_epoch < asked):
        raise TemporaryError(
            f"the hub holds no permits of {'an epoch' if asked is None else f'epoch {asked}'} of run {run!r}: it lost its "
            "data after the learner had opened the epoch; start the learner again, it restores them from its checkpoint"
        )
    if asked is not None and open_epoch > asked:
        raise taken_over(run, asked, open_epoch)


def taken_over(run: str, epoch: int, newer: int) -> ConfigError:
    return ConfigError(
        f"epoch {epoch} of run {run!r} hands out no permits: epoch {newer} is open, another learner works on this run; "
        "run one learner per run name"
    )
