"""Which rollouts share a forward pass, and how they are padded.

Invariant: the plan is a function of the rollouts' lengths alone; every rollout is in exactly one microbatch; every
rank has the same number of microbatches (ZeRO 2 and 3 communicate in each, so a rank with fewer would leave the
others waiting). Held by tests/unit/kernels/test_packing.py.

Padding is on the right: under causal attention no real token sees it, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pad_right(rows: Sequence[NDArray[np.generic]], dtype: np.dtype | type, fill: int | float = 0) -> NDArray:  # type: ignore[type-arg]
    """Stack vectors of different lengths into [rows, longest], padded on the right with `fill`."""
    padded = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def plan_microbatches(lengths: Sequence[int], *, budget_tokens: int, ranks: int = 1) -> list[list[list[int]]]:
    """Split rows into microbatches of at most `budget_tokens` padded tokens, dealt out to `ranks`.

    Rows are taken longest first (ties: in the given order), which keeps rows of like length together and padding
    small. A row longer than the budget has a microbatch of its own. When the number of microbatches is not a
    multiple of `ranks`, the largest are halved; if rows are too few even for that, some get none.

    Args:
        lengths: tokens of each row, prompt included.

    Returns:
        For each rank its microbatches, each a list of row numbers (empty: a pass without rows); microbatch k of
        the batch goes to rank k mod `ranks`.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        width = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * width <= budget_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    while len(batches) % ranks or not batches:
        largest = max(
            range(len(batches)), key=lambda k: (len(batches[k]) > 1, _area(batches[k], lengths)), default=None
        )
        if largest is None or len(batches[largest]) < 2:
            batches.append([])
        else:
            batch = batches[largest]
            batches[largest : largest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    return [batches[rank::ranks] for rank in range(ranks)]


def _area(batch: Sequence[int], lengths: Sequence[int]) -> int:
    return len(batch) * lengths[batch[0]] if batch else 0
