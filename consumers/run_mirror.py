"""A run whose records are in an object store, mirrored into a directory of this machine.

Invariant: a mirrored file is whole and of the size that the store tells; what is there in the same size and age is not fetched again,
what went from the store goes from the mirror. The store is read only. Held by tests/unit/consumers/test_run_mirror.py.

URL/trajectories/..., URL/steps/..., URL/fates/..., URL/metrics.jsonl, URL/versions.jsonl become the same names below
`cache_directory(url)`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from anabranch.schemas.errors import ConfigError, StreamUnavailableError, UsageError
from anabranch.transport.files import write_atomically

_NAMES = re.compile(
    r"(trajectories/.*\.parquet|steps/epoch=\d+/\d+/(facts\.json|rank-\d+\.parquet)|fates/\d+\.jsonl|"
    r"metrics\.jsonl|versions\.jsonl|resolved\.toml|config\.toml)\Z"
)
_OF_CLIENT = ("allow_http", "allow_invalid_certificates")


def cache_directory(url: str) -> Path:
    """Of this user, for that URL."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "anabranch" / "runs" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def mirror_run(url: str, *, options: Mapping[str, str] | None = None, cache: Path | None = None) -> Path:
    """Fetch what is new of the run at `url`; the directory that mirrors it.

    Args:
        options: of the store, as channel.blob_options; credentials come from the environment.

    Raises:
        ConfigError: the URL or an option is not usable.
        StreamUnavailableError: the store does not answer.
        UsageError: there is no run at that URL.
    """
    import obstore
    from obstore import exceptions

    directory = cache or cache_directory(url)
    store = _open(url, dict(options or {}))
    try:
        listed = [dict(meta) for page in obstore.list(store) for meta in page]
        wanted = {str(meta["path"]): meta for meta in listed if _is_ours(str(meta["path"]))}
        if not wanted:
            raise UsageError(
                f"{_shown(url)} holds no recorded run: neither trajectories, steps, fates nor metrics.jsonl"
            )
        _forget(directory, set(wanted))
        # facts last: a step's record is whole when they are there
        for name in sorted(wanted, key=lambda name: (name.endswith("facts.json"), name)):
            target, meta = directory / name, wanted[name]
            changed_s = meta["last_modified"].timestamp()
            if not _same(target, meta["size"], changed_s):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, bytes(obstore.get(store, name).bytes()))
                os.utime(target, (changed_s, changed_s))
    except FileNotFoundError as error:
        raise UsageError(f"{_shown(url)}: {error}; ask again if the recorder is at work there") from error
    except (exceptions.BaseError, OSError) as error:
        raise StreamUnavailableError(
            f"{_shown(url)} does not answer as it should: {str(error).splitlines()[0][:300]}"
        ) from error
    return directory


def _open(url: str, options: dict[str, str]) -> Any:
    from obstore import exceptions
    from obstore.store import from_url

    client: dict[str, Any] = {
        name: options.pop(name).lower() in ("true", "1", "yes") for name in _OF_CLIENT if name in options
    }
    try:
        if url.startswith("file://"):
            return from_url(url)
        return from_url(url, config=options, client_options=client)  # type: ignore[call-overload]
    except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{_shown(url)} cannot be used: {str(error).splitlines()[0][:300]}") from error


def _is_ours(name: str) -> bool:
    return _NAMES.match(name) is not None and ".." not in PurePosixPath(name).parts


def _same(path: Path, size: int, changed_s: float) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_size == size and abs(stat.st_mtime - changed_s) < 1e-3


def _forget(directory: Path, wanted: set[str]) -> None:
    for path in directory.rglob("*") if directory.is_dir() else ():
        if path.is_file() and str(path.relative_to(directory)) not in wanted:
            path.unlink()


def _shown(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
