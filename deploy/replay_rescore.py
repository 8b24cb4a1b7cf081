"""`anabranch replay rescore`: another reward over recorded text, and what it would have changed.

Invariant: nothing recorded is changed; every trajectory that fits the filters is counted once: scored, or under the reason why it
could not be. Held by tests/unit/deploy/test_replay_rescore.py.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import TrajectoryFilter
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import number, table
from anabranch.schemas.config import TaskSection
from anabranch.schemas.errors import ConfigError, RewardError, UsageError

EXAMPLES = 20
_PROMPT_TRIES = 16  # a problem whose prompt is too long is passed over for the next one of its index
_COLUMNS = "id, group_id, region, producer, seq, sample_index, group_index, attempt, prompt_text, text, answer, reward"
Row = Mapping[str, Any]
Scorer = Callable[[Row], float]


@dataclass(slots=True)
class Rescored:
    """Trajectories, and groups all of which were scored. `moves`: (reward before, after) -> how many; `unscored`: reason -> how many; a group is flat if
    all its rewards are the same: such a one has no gradient."""

    trajectories: int = 0
    changed: int = 0
    before_sum: float = 0.0
    after_sum: float = 0.0
    groups: int = 0
    flat_before: int = 0
    flat_after: int = 0
    moves: Counter[tuple[float, float]] = field(default_factory=Counter)
    unscored: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def rescore(reader: RunReader, wanted: TrajectoryFilter, scorer: Scorer) -> Rescored:
    """Raises UsageError, TemporaryError: as `RunReader.query`."""
    found = Rescored()
    group: list[tuple[float, float] | None] = []
    at: str | None = None
    where, values = wanted.where()
    order = "region, producer, seq, sample_index"
    with reader.batches(f"SELECT {_COLUMNS} FROM trajectories WHERE {where} ORDER BY {order}", values) as batches:
        for batch in batches:
            for row in batch.to_pylist():
                if row["group_id"] != at:
                    _close(found, group)
                    at, group = row["group_id"], []
                group.append(_score(found, scorer, row))
    _close(found, group)
    return found


def _score(found: Rescored, scorer: Scorer, row: Row) -> tuple[float, float] | None:
    try:
        after = float(scorer(row))
        if not math.isfinite(after):
            raise RewardError(f"the function gave {after}")
    except Exception as error:  # noqa: BLE001 - a user's function: whatever it raises is told, and the others are scored
        found.unscored[f"{type(error).__name__}: {str(error)[:200]}"] += 1
        return None
    before = row["reward"]
    found.trajectories += 1
    found.before_sum += before
    found.after_sum += after
    found.moves[before, after] += 1
    if before != after:
        found.changed += 1
        if len(found.examples) < EXAMPLES:
            found.examples.append({"id": row["id"], "before": before, "after": after, "text": row["text"]})
    return before, after


def _close(found: Rescored, group: list[tuple[float, float] | None]) -> None:
    """A group that was not scored as a whole says nothing about gradients."""
    pairs = [pair for pair in group if pair is not None]
    if pairs and len(pairs) == len(group):
        found.groups += 1
        found.flat_before += len({before for before, _ in pairs}) == 1
        found.flat_after += len({after for _, after in pairs}) == 1


def load_function(name: str) -> Scorer:
    """`module:function` or `path/to/file.py:function`, called with (prompt, text, answer). Raises UsageError."""
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise UsageError(f"--with {name[:200]!r}: give module:function, or path/to/file.py:function")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"--with: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(
            function_name, [n for n in dir(module) if callable(getattr(module, n))], n=1, cutoff=0.0
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--with: {module_name} has no function {function_name!r}{hint}")
    return lambda row: function(row["prompt_text"], row["text"], row["answer"])


def task_scorer(section: TaskSection, seed: int) -> Scorer:
    """The environment of `section`: the recorded prompt must be one of its. Raises ConfigError."""
    from anabranch.producers.environments.reasoning_gym import Task

    task = Task(section, seed)

    def score(row: Row) -> float:
        for attempt in range(_PROMPT_TRIES):
            problem = task.prompt(row["group_index"], attempt)
            if problem.prompt_text == row["prompt_text"]:
                return task.score(problem, row["text"])
        raise ConfigError("this task and seed give that index another prompt: only its answer could be compared")

    return score


def render(found: Rescored, width: int) -> str:
    n = max(1, found.trajectories)
    lines = [
        f"{found.trajectories:,} trajectories scored anew, {found.changed:,} rewards change ({found.changed / n:.2%})",
        f"mean reward {number(found.before_sum / n)} before, {number(found.after_sum / n)} after",
        f"groups without gradient {found.flat_before:,} of {found.groups:,} before, {found.flat_after:,} after",
    ]
    lines += [f"{count:,} not scored: {plain(reason, width - 24)}" for reason, count in found.unscored.most_common(10)]
    moved = [(move, count) for move, count in found.moves.most_common() if move[0] != move[1]]
    if moved:
        cells = [[number(a), number(b), f"{count:,}"] for (a, b), count in moved[:20]]
        lines += ["", *table(["before", "after", "trajectories"], cells, left=())]
        cells = [
            [plain(e["id"]), number(e["before"]), number(e["after"]), plain(e["text"], 60)] for e in found.examples
        ]
        lines += ["", *table(["id", "before", "after", "text"], cells, left=(0, 3))]
    return "\n".join(lines)


def as_json(found: Rescored) -> dict[str, Any]:
    moves = [{"before": a, "after": b, "trajectories": n} for (a, b), n in found.moves.most_common()]
    return asdict(found) | {"moves": moves, "unscored": dict(found.unscored)}
