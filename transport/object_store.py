"""Objects under names in S3, Google Cloud Storage, Azure or a directory, through obstore.

Invariant: an object appears under its name whole or not at all, in a directory also after a power cut. Every call ends:
connecting, a silent server and repetitions are bounded by `deadline_s`, and what fails names the store, without credentials.
A directory is made by `make` or the first `put` alone, and only its last component, so that neither a reader nor a path that is
wrong or not mounted leaves an empty store behind. Held by tests/contract/test_object_store.py,
tests/contract/test_blob_store.py and tests/contract/test_blob_failures.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from anabranch.schemas.config.channel_rules import check_store
from anabranch.schemas.errors import AnabranchError, BackpressureError, ConfigError, StreamUnavailableError
from anabranch.transport.blob_files import make_durably, write_durably

T = TypeVar("T")

DEADLINE_S = 60.0
PART_BYTES = 16 * 2**20  # larger objects go up in parts, so that one request stays short
_BULK = 1000  # objects in one request to delete
_OF_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate", "proxy_excludes")
_MISSING = (FileNotFoundError, exceptions.NotFoundError)
_FULL = re.compile(r"os error (28|122)\b|No space left|QuotaExceeded|InsufficientStorage|507 Insufficient", re.I)
_REFUSED = re.compile(
    r"os error (1|13|30)\b|AccessDenied|InvalidAccessKey|SignatureDoesNotMatch|ExpiredToken|\b40[13] [UF]", re.I
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.I)


@dataclass(frozen=True, slots=True)
class Stored:
    """`changed_s`: Unix time of the last put, by the store's clock."""

    path: str
    bytes: int
    changed_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """How messages speak of a store. `what`: "the blob store"; `key`: says where it is; `room`: what to lower when it is full."""

    what: str
    key: str
    room: str


class WrongSizeError(Exception):
    """An object is not of the size that was asked for."""


class ObjectStore:
    """All methods may be called from several threads at once. They raise StreamUnavailableError when the store cannot be
    reached, BackpressureError when it is full, ConfigError when it refuses the credentials or is not there.

    Args:
        url: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX or file:///DIR.
        options: of the store, such as endpoint, region, allow_http; credentials come from the environment.
        aside: folder below a directory in which objects are written before they get their names.

    Raises ConfigError if the URL or an option is not usable; the store itself is first spoken to by a call.
    """

    def __init__(
        self,
        url: str,
        place: Place,
        *,
        options: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        aside: str = "aside",
    ) -> None:
        self._place, self._aside = place, aside
        self.where = f"{place.what} {shown(url)}"
        self._directory = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
        self._seen = False  # the directory: one that has been there is not made again
        self._store = self._open(url, dict(options or {}), deadline_s)

    def _open(self, url: str, options: dict[str, str], deadline_s: float) -> Any:
        client: dict[str, Any] = {name: options.pop(name) for name in _OF_CLIENT if name in options}
        for name in ("allow_http", "allow_invalid_certificates"):
            if name in client:
                client[name] = client[name].lower() in ("true", "1", "yes")
        client["connect_timeout"] = timedelta(seconds=min(5.0, deadline_s / 3))
        client["read_timeout"] = timedelta(seconds=deadline_s / 3)
        client["timeout"] = timedelta(seconds=10 * deadline_s)  # a whole answer, as long as bytes keep coming
        # Less than the read time-out: what was silent for that long is told (`Outage`) before it is tried again.
        retry: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=deadline_s / 4)}
        try:
            check_store(url)
            if self._directory is not None:
                if options:
                    raise ConfigError(f"{self.where} is a directory: it takes no options ({', '.join(options)})")
                return None  # until it is there, see `_reach`
            if url.startswith("az://"):  # obstore takes the host for the container, and the account as an option
                parts = urlsplit(url)
                options.setdefault("account_name", parts.netloc)
                url = f"az://{parts.path.lstrip('/')}"
            return from_url(url, config=options, client_options=client, retry_config=retry)  # type: ignore[call-overload]
        except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
            raise ConfigError(f"{self.where} cannot be used: {_reason(error)}; see {self._place.key}") from None

    def make(self) -> None:
        """A directory, as the first `put` does; elsewhere nothing: buckets are made by their owner."""
        if self._directory is not None:
            self._make_directory(self._directory)

    def put(self, path: str, content: bytes | Iterable[bytes]) -> None:
        if (directory := self._directory) is not None:
            self._make_directory(directory)
            self._call(lambda: write_durably(directory / path, content, aside=directory / self._aside))
        else:
            self._call(lambda: obstore.put(self._store, path, content, chunk_size=PART_BYTES, max_concurrency=4))

    def get(self, path: str, *, size_bytes: int | None = None) -> bytes | None:
        """The object, None if there is none. Raises WrongSizeError if it is not of `size_bytes`, before a byte of it is fetched."""
        store = self._reach()

        def call() -> bytes | None:
            try:
                found = obstore.get(store, path)
            except _MISSING as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                return None
            if size_bytes is not None and found.meta["size"] != size_bytes:
                raise WrongSizeError(f"{found.meta['size']} bytes of the {size_bytes} expected")
            return bytes(found.bytes())

        return self._call(call)

    def delete(self, paths: Sequence[str]) -> None:
        """One that is not there is no error."""
        for first in range(0, len(paths), _BULK):
            self._delete(paths[first : first + _BULK])

    def list(self, prefix: str | None = None) -> Iterator[Stored]:
        store = self._reach()
        pages = self._call(lambda: obstore.list(store, prefix=prefix, chunk_size=1000))
        while page := self._call(lambda: next(pages, None)):
            for meta in page:
                yield Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def _delete(self, paths: Sequence[str]) -> None:
        store = self._reach()

        def one(path: str) -> None:
            try:
                obstore.delete(store, path)
            except _MISSING as error:
                if _NO_BUCKET.search(str(error)):
                    raise

        def call() -> None:
            try:
                obstore.delete(store, [*paths])
            except _MISSING:  # some stores say so of one that is gone, and leave the rest
                for path in paths:
                    one(path)

        self._call(call)

    def _make_directory(self, directory: Path) -> None:
        if self._call(directory.is_dir):
            self._seen = True
        elif self._seen or not self._call(directory.parent.is_dir):
            raise self._not_there(directory)
        else:
            self._call(lambda: make_durably(directory))

    def _not_there(self, directory: Path) -> AnabranchError:
        above = "" if os.path.isdir(directory.parent) else f", and neither does {directory.parent}"
        return StreamUnavailableError(
            f"{self.where} does not exist on this machine{above}; mount it, make it, or correct {self._place.key}"
        )

    def _reach(self) -> Any:
        """The store to read from. Raises StreamUnavailableError if it is a directory that does not exist."""
        if (directory := self._directory) is None:
            return self._store
        if not self._call(directory.is_dir):
            raise self._not_there(directory)
        self._seen = True
        if self._store is None:
            self._store = self._call(lambda: LocalStore(directory))
        return self._store

    def _call(self, call: Callable[[], T]) -> T:
        """`call()`, its failures turned into this project's errors."""
        try:
            return call()
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise self._refused(error) from None
        except (exceptions.BaseError, OSError) as error:
            text = str(error)
            if _NO_BUCKET.search(text):
                raise ConfigError(
                    f"{self.where} does not exist; make the bucket, or correct {self._place.key}"
                ) from None
            if _REFUSED.search(text) or (isinstance(error, OSError) and error.errno in (1, 13, 30)):
                raise self._refused(error) from None
            if _FULL.search(text) or (isinstance(error, OSError) and error.errno in (28, 122)):
                raise BackpressureError(
                    f"{self.where} is full ({_reason(error)}); nothing was lost: give it more space, or lower "
                    f"{self._place.room}"
                ) from None
            raise StreamUnavailableError(
                f"{self.where} does not answer as it should ({_reason(error)}); check that it runs, that the address "
                "is right and that this machine may reach it"
            ) from None

    def _refused(self, error: Exception) -> AnabranchError:
        return ConfigError(
            f"{self.where} refused access ({_reason(error)}); check the credentials in the environment and what they "
            "allow"
        )


def shown(url: str) -> str:
    """`url` without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _reason(error: Exception) -> str:
    """The first line of an error: what follows is for the store's developers, and may hold keys and signed URLs."""
    line = str(error).partition("\n")[0].partition("<")[0].strip(" :")
    return re.sub(r"\?\S*", "?...", line)[:300] or type(error).__name__
