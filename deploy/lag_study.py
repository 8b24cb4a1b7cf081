"""What a lag study consists of: corrections by name, lags, learning rates, seeds; and the file that its results go to.

Invariant: a results file holds whole cells only (a line that was torn by a crash is cut off), each once, and only cells of one
model and one set of settings can be added to it: figures of one file can be compared. Held by
tests/unit/deploy/test_lag_study.py.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import xxhash

from anabranch.deploy.demo_options import DemoOptions, resolve
from anabranch.deploy.lag_measures import Measuring
from anabranch.schemas.config import RunConfig
from anabranch.schemas.config.correction import Objective
from anabranch.schemas.errors import ConfigError, TemporaryError, UsageError
from anabranch.transport.files import sync_directory

LAGS = (0, 1, 4, 8, 16, 32)
OBJECTIVES: tuple[str, ...] = get_args(Objective)
_RUN_OF_ITS_OWN = {"learner": ("lr", "steps"), "correction": ("max_age",)}  # what the name of a cell says already


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run."""

    correction: str  # as it was asked for, `default` by its own name
    lag: int
    lr: float
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.correction}, lag {self.lag}, lr {self.lr:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Study:
    """Its cells in the order in which they are run: a whole table for the first seed, then for the second, ..."""

    cells: tuple[Cell, ...]
    configs: dict[Cell, RunConfig]
    measuring: Measuring

    def settings(self, cell: Cell) -> str:
        """A digest of all that determines the cell but its name."""
        config = self.configs[cell]
        sections = config.model_dump(mode="json", include={"task", "sampling", "learner", "correction", "gates"})
        for section, keys in _RUN_OF_ITS_OWN.items():
            for key in keys:
                del sections[section][key]
        sections["measuring"] = asdict(self.measuring)
        sections["model"] = _model_digest(config.model.path)
        return xxhash.xxh3_64_hexdigest(json.dumps(sections, sort_keys=True).encode())


def make_study(
    *,
    preset: str,
    overrides: Sequence[str],
    model: Path,
    corrections: Sequence[str],
    lags: Sequence[int],
    lrs: Sequence[float],
    seeds: int,
    steps: int,
    measuring: Measuring,
) -> Study:
    """Every combination.

    Args:
        corrections: `default`, `all`, or an objective, each with keys of `[correction]` after commas: `dppo_tv,narrow_with_age`,
            `ppo,clip_high=0.2`.

    Raises:
        UsageError: a list is empty, a number is out of range, a correction is there twice.
        ConfigError: an objective, a key or a value that does not exist.
    """
    for name, values in (("--objectives", corrections), ("--lags", lags), ("--lrs", lrs)):
        if not values:
            raise UsageError(f"{name}: at least one")
    if min(lags) < 0:
        raise UsageError(f"--lags {min(lags)}: at least 0")
    if not min(lrs) > 0:
        raise UsageError(f"--lrs {min(lrs):g}: above 0")
    if seeds < 1 or steps < 1:
        raise UsageError("--seeds and --steps: at least 1")
    named = dict(_named(text) for text in _spelled_out(corrections))
    if len(named) < len(_spelled_out(corrections)):
        raise UsageError("--objectives: one of them is there twice")
    configs: dict[Cell, RunConfig] = {}
    for seed in range(seeds):
        for lr in lrs:
            for name, keys in named.items():
                own = [
                    f"model.path={json.dumps(str(model))}",
                    f"learner.lr={lr!r}",
                    f"learner.steps={steps}",
                    f"run.seed={seed}",
                ]
                config = resolve(DemoOptions(preset=preset), [*overrides, *own, *keys])
                configs |= {Cell(name, lag, lr, seed, steps): config for lag in lags}
    return Study(tuple(configs), configs, measuring)


def _spelled_out(corrections: Sequence[str]) -> list[str]:
    return [each for text in corrections for each in (OBJECTIVES if text == "all" else [text])]


def _named(text: str) -> tuple[str, list[str]]:
    """A correction's name, and the keys of the configuration that it stands for."""
    objective, *keys = text.split(",")
    if objective == "default":
        objective = RunConfig().correction.objective
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"--objectives {text}: no objective {objective!r}; there are {', '.join(OBJECTIVES)}, default, all"
        )
    settings = [f"correction.{key if '=' in key else f'{key}=true'}" for key in keys]
    return ",".join([objective, *keys]), [f'correction.objective="{objective}"', *settings]


@lru_cache(maxsize=1)
def _model_digest(folder: Path) -> str:
    digest = xxhash.xxh3_64()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Results:
    """The cells in a file, one JSON object a line. Made by `open_results`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self.rows = read_rows(path)
        self._by_cell = {cell_of(row): row for row in self.rows}

    def missing(self, study: Study) -> list[Cell]:
        """Cells of `study` that have no result yet, in order.

        Raises:
            ConfigError: a result is there, but of other settings or another model.
        """
        for cell in study.cells:
            found = self._by_cell.get(cell)
            if found is not None and found["settings"] != study.settings(cell):
                raise ConfigError(
                    f"{self._path} has {cell} with other settings, another model or other code of it: give the settings of that "
                    "study, or another --results"
                )
        return [cell for cell in study.cells if cell not in self._by_cell]

    def add(self, cell: Cell, settings: str, result: dict[str, Any]) -> None:
        """Durable when it returns. Raises OSError."""
        row = {**asdict(cell), "settings": settings, **result}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if os.write(self._fd, line) != len(line):
            raise OSError(f"{self._path}: a line was written in part; the disk may be full")
        os.fsync(self._fd)
        self.rows.append(row)
        self._by_cell[cell] = row


@contextmanager
def open_results(path: Path, *, resume: bool) -> Iterator[Results]:
    """The file, made if missing, for us alone.

    Raises:
        UsageError: it has results and `resume` is false.
        TemporaryError: another study is writing it.
        ConfigError: what is in it is no result of a study.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TemporaryError(
                f"{path} is being written by another study; wait for it, or choose another --results"
            ) from None
        content = path.read_bytes()
        if content and not resume:
            raise UsageError(f"{path} has results already: --resume goes on with them, another --results begins anew")
        os.ftruncate(fd, content.rfind(b"\n") + 1)  # the last line may be torn
        results = Results(path, fd)
        sync_directory(path.parent)
        yield results
    finally:
        os.close(fd)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The cells in `path`; a last line without its end does not count. Raises ConfigError: it cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        rows = [json.loads(line) for line in lines]
        for row in rows:
            cell_of(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the results of a lag study: {error}") from error
    return rows


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(row["correction"], row["lag"], row["lr"], row["seed"], row["steps"])
