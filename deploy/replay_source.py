"""What `anabranch replay` looks at: a run directory, a URL of an object store, or the streams of a configured run.

Invariant: nothing is written where the run is. A directory that is no run's is refused with those nearby that are. Held by
tests/unit/deploy/test_replay_source.py.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anabranch.consumers.run_files import is_run_directory
from anabranch.consumers.run_reader import RunReader
from anabranch.deploy.regions_asked import impatient
from anabranch.schemas.config import RunConfig, dump_toml
from anabranch.schemas.errors import UsageError
from anabranch.transport import wiring


@dataclass(frozen=True)
class Source:
    """`directory` None: the streams alone. `config_text`: the run's resolved configuration, "" if it is not known."""

    reader: RunReader
    directory: Path | None
    config_text: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.config_text)
        except tomllib.TOMLDecodeError:
            return {}

    def setting(self, section: str, key: str) -> Any:
        """None where the run's configuration is not known."""
        return self.settings.get(section, {}).get(key)


@contextmanager
def open_source(run: str | None, config: RunConfig | None, *, streams: bool = False) -> Iterator[Source]:
    """The run that `run` (a directory or a URL) names, or else that of `config`.

    Args:
        streams: also what is in the streams of `config`, and not recorded yet. A run without a directory on this machine is
            read from its streams anyway.

    Raises:
        UsageError: no such run.
        StreamUnavailableError, ConfigError: the store, or every stream, cannot be reached.
    """
    with ExitStack() as stack:
        directory = _directory(run, config)
        wanted = streams or (directory is None and config is not None)
        connected = {}
        if wanted and config is not None:
            connected = wiring.connect_regions(impatient(config))
            for stream in connected.values():
                stack.callback(stream.close)
        limit = {} if config is None else {"max_entry_bytes": config.stream.max_entry_bytes}
        reader = stack.enter_context(RunReader(directory, streams=connected, **limit))
        yield Source(reader, directory, _config_text(directory, config))


def _directory(run: str | None, config: RunConfig | None) -> Path | None:
    if run is None:
        assert config is not None
        directory = config.run.directory
        return directory if is_run_directory(directory) else None
    if "://" in run:
        from anabranch.consumers.run_mirror import mirror_run

        return mirror_run(run, options=_store_options(config))
    return checked_directory(Path(run))


def _store_options(config: RunConfig | None) -> dict[str, str]:
    """Those of the recorder's store; a run that was copied by hand lies where its weights do."""
    return {} if config is None else dict(config.recorder.store_options or config.channel.blob_options)


def checked_directory(path: Path) -> Path:
    """Raises UsageError, with the nearest runs, unless `path` is a run directory."""
    if is_run_directory(path):
        return path
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir() and is_run_directory(p))
        if inside:
            raise UsageError(f"{path} is no run directory; runs in it: {', '.join(inside[:10])}")
        raise UsageError(f"{path} is no run directory: it has neither trajectories, steps, fates nor metrics.jsonl")
    names = sorted(p.name for p in path.parent.iterdir() if is_run_directory(p)) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.0)
    told = f"; nearest in {path.parent}: {', '.join(near)}" if near else ""
    raise UsageError(f"there is no run directory {path}{told}")


def _config_text(directory: Path | None, config: RunConfig | None) -> str:
    if directory is not None:
        for name in ("resolved.toml", "config.toml"):
            try:
                return (directory / name).read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    return "" if config is None else dump_toml(config)
