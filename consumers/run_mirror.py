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
from typing import TYPE_CHECKING

from anabranch.schemas.errors import StreamUnavailableError, UsageError
from anabranch.transport.files import write_atomically

if TYPE_CHECKING:
    from anabranch.transport.object_store import ObjectStore

_NAMES = re.compile(
    r"(trajectories/.*\.parquet|steps/epoch=\d+/\d+/(facts\.json|rank-\d+\.parquet)|fates/\d+\.jsonl|"
    r"metrics\.jsonl|versions\.jsonl|resolved\.toml|config\.toml)\Z"
)
_LISTINGS = 3


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
    from anabranch.transport.object_store import ObjectStore, Place

    directory = cache or cache_directory(url)
    store = ObjectStore(
        url, Place("the store", "--run", "what is there"), options={} if url.startswith("file://") else options
    )
    for _ in range(_LISTINGS):
        if _fetch(store, directory):
            return directory
    raise StreamUnavailableError(f"{store.where}: files go faster than they are fetched; ask again")


def _fetch(store: ObjectStore, directory: Path) -> bool:
    """Whether all that a listing named was still there."""
    wanted = {one.path: one for one in store.list() if _is_ours(one.path)}
    if not wanted:
        raise UsageError(f"{store.where} holds no recorded run: neither trajectories, steps, fates nor metrics.jsonl")
    _forget(directory, set(wanted))
    # facts last: a step's record is whole when they are there
    for name in sorted(wanted, key=lambda name: (name.endswith("facts.json"), name)):
        target, one = directory / name, wanted[name]
        if not _same(target, one.bytes, one.changed_s):
            content = store.get(name)
            if content is None:  # merged or dropped meanwhile
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, content)
            os.utime(target, (one.changed_s, one.changed_s))
    return True


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
