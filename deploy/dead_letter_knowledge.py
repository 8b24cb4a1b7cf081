"""What can be known, before dead letters are put back, of what will become of them.

Invariant: everything here is optional: a hub that is away, or a machine without the run directory, makes the preview say less
and never stops the command. Held by tests/unit/deploy/test_dead_letter_knowledge.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from anabranch.consumers.fate_files import FATES_DIRECTORY, read_fates
from anabranch.deploy.dead_letter_moves import Knowledge
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.fates import CONSUMED
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import RunBoard
from anabranch.transport.wiring import connect_hub


def gather(config: RunConfig, warn: Callable[[str], None]) -> Knowledge:
    """Of the hub and of the run directory; `warn` is told what cannot be asked. Raises ConfigError: credentials."""
    known = Knowledge(config.run.name, config.stream.max_entry_bytes, config.correction.max_age)
    try:
        known = replace(known, trained=trained_indices(config.run.directory))
    except OSError as error:
        warn(f"which groups have been trained is not known: {error}")
    try:
        hub = connect_hub(config)
        try:
            return of_board(known, hub.runs)
        finally:
            hub.close()
    except TemporaryError as error:
        warn(f"what the learner does is not known: {error}")
        return known


def of_board(known: Knowledge, board: RunBoard) -> Knowledge:
    """Raises StreamUnavailableError."""
    status = board.learner()
    version = None if status is None else PolicyVersion(status.epoch, status.version)
    return replace(known, version=version, finished=board.finished())


def trained_indices(run_directory: Path) -> set[int] | None:
    """Of the fate log, None if there is none here. Raises OSError."""
    directory = run_directory / FATES_DIRECTORY
    if not directory.is_dir():
        return None
    return {record.group_index for record in read_fates(directory) if record.fate in CONSUMED}
