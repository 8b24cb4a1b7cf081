"""Which rollouts share a packed row, and which rank computes it: bins of a token budget, balanced by cost.

Invariant: the plan is a function of the rollouts' lengths and groups alone; every rollout is in exactly one microbatch; no
microbatch exceeds the budget unless one rollout alone does; every rank has the same number of microbatches (ZeRO 2 and 3
communicate in each, so a rank with fewer would leave the others waiting), and the k-th of all ranks cost about the same.
Held by tests/unit/kernels/test_row_plan.py.

A *unit* goes into a bin as a whole: a rollout, or, where a prompt is shared, the rollouts of a group that it is computed once
for. Best-fit decreasing packing says how many bins there must be. Units are dealt out by cost, first over the ranks, then
over the bins of each: the costliest first to the cheapest, then exchanged while that makes the costliest cheaper. Where
ranks would wait for one another a unit of several rollouts is halved, which costs its prompt once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_EXCHANGES = 64  # at most so many, each makes the costliest bin cheaper
_EVEN = 1.005  # a costliest bin of this times the mean is good enough
_HALVINGS = 16
_WORTH = 0.995  # a halved unit must make the step shorter than this share of what it was


@dataclass(frozen=True)
class Costs:
    """What a forward and backward pass costs, in any unit: multiply-adds, say."""

    per_token: float = 1.0  # of a position, outside attention
    per_pair: float = 0.0  # of a query and a key that it sees
    per_target: float = 0.0  # of a token's log-prob


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a rollout: tokens of its prompt and of its completion (at least one each), and which group's prompt that is."""

    prompt: int
    completion: int
    group: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Rollouts that go together, and the positions and the cost of computing them."""

    rows: tuple[int, ...]
    tokens: int
    cost: float


Bin = list[Unit]


def positions(prompt: int, completions: Sequence[int]) -> int:
    """Positions of a prompt with its completions. The last token of each predicts nothing and is not computed."""
    return prompt + sum(completions) - len(completions)


def cost_of(prompt: int, completions: Sequence[int], costs: Costs) -> float:
    """Cost of a prompt, computed once, and of its completions after it."""
    pairs = prompt * (prompt + 1) // 2
    for n in completions:
        pairs += (n - 1) * n // 2 + (n - 1) * prompt
    return (
        costs.per_token * positions(prompt, completions) + costs.per_pair * pairs + costs.per_target * sum(completions)
    )


def plan_rows(
    rollouts: Sequence[Lengths], *, budget_tokens: int, ranks: int = 1, costs: Costs = Costs(), share: bool = False
) -> list[list[list[int]]]:
    """Split rollouts into packed rows of at most `budget_tokens` positions, dealt out to `ranks`.

    Args:
        share: whether the rollouts of a group that are in one row have their prompt in common.

    Returns:
        For each rank its microbatches, each a list of rollouts (numbers in `rollouts`, ascending; empty: a pass without
        rollouts), equally many for every rank and at least one.
    """
    planner = _Planner(rollouts, budget_tokens, ranks, costs, share)
    units = planner.units()
    best = planner.deal(units)
    for _ in range(_HALVINGS):
        if step_cost(best) <= sum(_cost(b) for rank in best for b in rank) / ranks / _WORTH:
            break
        largest = max(units, key=lambda u: (len(u.rows) > 1, u.cost), default=None)
        if largest is None or len(largest.rows) < 2:
            break
        units = [u for u in units if u is not largest] + planner.halves(largest)
        other = planner.deal(units)
        if step_cost(other) < _WORTH * step_cost(best):
            best = other
    return [[sorted(row for unit in b for row in unit.rows) for b in rank] for rank in best]


def step_cost(plan: Sequence[Sequence[Bin]]) -> float:
    """What a step costs whose ranks wait for one another after every microbatch."""
    return float(sum(max(_cost(b) for b in turn) for turn in zip(*plan, strict=True)))


class _Planner:
    def __init__(self, rollouts: Sequence[Lengths], budget_tokens: int, ranks: int, costs: Costs, share: bool) -> None:
        self._rollouts, self._budget, self._ranks, self._costs = rollouts, budget_tokens, ranks, costs
        self._share = share

    def unit(self, rows: Sequence[int]) -> Unit:
        prompt = self._rollouts[rows[0]].prompt
        completions = [self._rollouts[row].completion for row in rows]
        return Unit(tuple(rows), positions(prompt, completions), cost_of(prompt, completions, self._costs))

    def units(self) -> list[Unit]:
        """Rollouts that share a prompt, as many as the budget holds; by themselves where nothing is shared."""
        alone = [self.unit([row]) for row in range(len(self._rollouts))]
        if not self._share:
            return alone
        groups: dict[int, list[Unit]] = {}
        for unit, lengths in zip(alone, self._rollouts, strict=True):
            groups.setdefault(lengths.group, []).append(unit)
        found = []
        for members in groups.values():
            prompt = self._rollouts[members[0].rows[0]].prompt
            rest = [Unit(u.rows, u.tokens - prompt, u.cost) for u in members]
            for part in _balanced(rest, len(_packed(rest, self._budget - prompt)), self._budget - prompt):
                found.append(self.unit(sorted(row for u in part for row in u.rows)))
        return found

    def halves(self, unit: Unit) -> list[Unit]:
        parts = _balanced([self.unit([row]) for row in unit.rows], 2, None)
        return [self.unit(sorted(row for u in part for row in u.rows)) for part in parts]

    def deal(self, units: Sequence[Unit]) -> list[list[Bin]]:
        """Each rank's bins."""
        units = list(units)
        if self._ranks == 1:
            # Nobody waits: full bins are as good as even ones.
            return [_packed(units, self._budget) or [[]]]
        count = max(1, len(_packed(units, self._budget)))
        count += -count % self._ranks
        while len(units) < count:
            # A rank would have nothing to do: more of the large units.
            largest = max(units, key=lambda u: (len(u.rows) > 1, u.cost), default=None)
            if largest is None or len(largest.rows) < 2:
                break
            units = [u for u in units if u is not largest] + self.halves(largest)
        each = count // self._ranks
        by_rank = _balanced(units, self._ranks, None)
        each = max([each, *(len(_packed(mine, self._budget)) for mine in by_rank)])
        plan = [_balanced(mine, each, self._budget) for mine in by_rank]
        # The costliest first, so that ranks work on microbatches of like cost at the same time.
        return [sorted(bins, key=lambda b: (-_cost(b), [u.rows for u in b])) for bins in plan]


def _cost(units: Sequence[Unit]) -> float:
    return sum(u.cost for u in units)


def _packed(units: Sequence[Unit], budget: int) -> list[Bin]:
    """Best-fit decreasing: into the fullest bin that has room, else into a new one."""
    bins: list[Bin] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: (-u.tokens, u.rows)):
        fitting = [(left, k) for k, left in enumerate(room) if left >= unit.tokens]
        if fitting:
            _, k = min(fitting)
            bins[k].append(unit)
            room[k] -= unit.tokens
        else:
            bins.append([unit])
            room.append(budget - unit.tokens)
    return bins


def _balanced(units: Sequence[Unit], count: int, budget: int | None) -> list[Bin]:
    """`count` bins of about equal cost, none over the budget (None: there is none) unless one unit alone is."""
    bins = _dealt(units, count, budget)
    if bins is None:
        assert budget is not None
        bins = _packed(units, budget)
        bins += [[] for _ in range(count - len(bins))]
    _exchange(bins, budget)
    return bins


def _dealt(units: Sequence[Unit], count: int, budget: int | None) -> list[Bin] | None:
    """The costliest first, each to the cheapest bin with room; None if that does not work out."""
    bins: list[Bin] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    for unit in sorted(units, key=lambda u: (-u.cost, u.rows)):
        open_ = [k for k in range(count) if budget is None or not bins[k] or tokens[k] + unit.tokens <= budget]
        if not open_:
            return None
        k = min(open_, key=lambda k: (costs[k], len(bins[k]), k))  # what costs nothing is spread too
        bins[k].append(unit)
        costs[k] += unit.cost
        tokens[k] += unit.tokens
    return bins


def _exchange(bins: list[Bin], budget: int | None) -> None:
    """Move a unit out of the costliest bin, or exchange it for a cheaper one, while that makes the costlier of the two bins
    cheaper."""
    for _ in range(_EXCHANGES):
        costs = [_cost(b) for b in bins]
        tokens = [sum(u.tokens for u in b) for b in bins]
        top = max(range(len(bins)), key=lambda k: (costs[k], -k), default=0)
        if not bins or costs[top] * len(bins) <= _EVEN * sum(costs):
            return
        best: tuple[float, int, Unit, Unit | None] | None = None
        out = np.array([(u.cost, u.tokens) for u in bins[top]])[:, None]
        for k in range(len(bins)):
            if k == top:
                continue
            back = np.array([(0.0, 0), *((u.cost, u.tokens) for u in bins[k])])[None]
            change, more = np.moveaxis(out - back, 2, 0)
            # The costlier bin falls by `change`, the other rises to `gap - change` below where the first was.
            gain = np.minimum(change, costs[top] - costs[k] - change)
            if budget is not None:
                gain = np.where((tokens[k] + more <= budget) & (tokens[top] - more <= budget), gain, -np.inf)
            i, j = divmod(int(gain.argmax()), gain.shape[1])
            if gain[i, j] > 1e-6 * costs[top] and (best is None or gain[i, j] > best[0]):
                best = float(gain[i, j]), k, bins[top][i], bins[k][j - 1] if j else None
        if best is None:
            return
        _, k, gone, come = best
        bins[top] = [u for u in bins[top] if u is not gone] + ([come] if come else [])
        bins[k] = [u for u in bins[k] if u is not come] + [gone]
