"""Which checkpoints stay, and why. Pure; held by tests/unit/learner/test_retention.py.

Invariant: the newest complete one always stays; what is kept for good depends on step numbers alone, so the order in which
checkpoints are made, or a learner that starts again, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anabranch.learner.checkpoint_folder import step_of

UNIVERSAL = "universal-"  # before the name of the checkpoint that it was made from


def kept_checkpoints(complete: Sequence[Path], *, keep: int, keep_every: int) -> dict[Path, str]:
    """Of the complete checkpoints, oldest first, those that stay -> why.

    Args:
        keep: so many of the newest, at least 1.
        keep_every: those of steps that it divides are kept for good, of each step the newest; 0: none. The untrained model
            of step 0 is none of them.
    """
    pinned = {}
    if keep_every:
        pinned = {step: p for p in complete if (step := step_of(p)) and step % keep_every == 0}
    kept = {place: f"of every {keep_every} steps" for place in pinned.values()}
    newest = complete[-max(1, keep) :]
    kept |= {place: "; ".join(filter(None, ["one of the newest", kept.get(place, "")])) for place in newest}
    if newest:
        kept[newest[-1]] = kept[newest[-1]].replace("one of the newest", "the newest")
    return {place: kept[place] for place in complete if place in kept}


def source_of(place: Path) -> Path:
    """The checkpoint that a converted one was made from, also one that is still aside; a checkpoint's is itself."""
    return place.with_name(place.name.removeprefix(".").removesuffix(".tmp").removeprefix(UNIVERSAL))
