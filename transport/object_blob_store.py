"""`BlobStore` in an object store (S3, GCS, Azure) or a directory, through obstore.

Invariant: that of `blob_store.py`. A chunk appears under its name whole or not at all, in a directory also after a power
cut. Every call ends: connecting, a silent server and repetitions are bounded by `deadline_s`, and what fails names the
store, without credentials. Objects are RUN/blobs/AB/ABCD... under the path of the URL.
A directory is made by the first `put` alone, and only its last component, so that neither a reader nor a path that is
wrong or not mounted leaves an empty store behind. Held by tests/contract/test_blob_store.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from anabranch.schemas.config import ChannelSection
from anabranch.schemas.config.channel_rules import check_blobs
from anabranch.schemas.errors import AnabranchError, BackpressureError, ConfigError, DeltaError, StreamUnavailableError
from anabranch.transport.blob_files import make_durably, write_durably
from anabranch.transport.blob_store import BlobInfo, blob_digest, checked_blob
from anabranch.transport.outage import Outage

T = TypeVar("T")

DEADLINE_S = 60.0
_PART_BYTES = 16 * 2**20  # larger chunks go up in parts, so that one request stays short
_BULK = 1000  # objects in one request to delete
_NAME = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})\Z")
_OF_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate", "proxy_excludes")
_MISSING = (FileNotFoundError, exceptions.NotFoundError)
_FULL = re.compile(r"os error (28|122)\b|No space left|QuotaExceeded|InsufficientStorage|507 Insufficient", re.I)
_REFUSED = re.compile(
    r"os error (1|13|30)\b|AccessDenied|InvalidAccessKey|SignatureDoesNotMatch|ExpiredToken|\b40[13] [UF]", re.I
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.I)


class ObjectBlobStore:
    """Chunks of one run.

    Args:
        url: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX or file:///DIR.
        options: of the store, such as endpoint, region, allow_http; credentials come from the environment.

    Raises ConfigError if the URL or an option is not usable; the store itself is first spoken to by `put` and `get`.
    """

    def __init__(
        self, url: str, run: str, *, options: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        self._where = f"the blob store {_shown(url)}"
        self._run = run
        self._directory = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
        self._outage = Outage()
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
            check_blobs(url)
            if self._directory is not None:
                if options:
                    raise ConfigError(f"{self._where} is a directory: it takes no options ({', '.join(options)})")
                return None  # until it is there, see `_reach`
            if url.startswith("az://"):  # obstore takes the host for the container, and the account as an option
                parts = urlsplit(url)
                options.setdefault("account_name", parts.netloc)
                url = f"az://{parts.path.lstrip('/')}"
            return from_url(url, config=options, client_options=client, retry_config=retry)  # type: ignore[call-overload]
        except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
            raise ConfigError(f"{self._where} cannot be used: {_reason(error)}; see channel.blobs") from None

    def put(self, payload: bytes) -> str:
        return self._outage.watch(lambda: self._put(payload))

    def _put(self, payload: bytes) -> str:
        digest = blob_digest(payload)
        path = self._path(digest)
        if (directory := self._directory) is not None:
            self._make_directory(directory)
            self._call(lambda: write_durably(directory / path, payload, aside=directory / self._run / "aside"))
        else:
            self._call(lambda: obstore.put(self._store, path, payload, chunk_size=_PART_BYTES))
        return digest

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
            f"{self._where} does not exist on this machine{above}; mount it, make it, or correct channel.blobs"
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

    def get(self, digest: str, size_bytes: int) -> bytes:
        store = self._reach()

        def call() -> bytes | None:
            try:
                found = obstore.get(store, self._path(digest))
            except _MISSING as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                return None
            if found.meta["size"] != size_bytes:  # before a byte of it is fetched
                raise DeltaError(
                    f"chunk {digest[:16]} in {self._where} was altered: {found.meta['size']} bytes of the "
                    f"{size_bytes} expected"
                )
            return bytes(found.bytes())

        return checked_blob(self._call(call), digest, size_bytes, self._where)

    def delete(self, digests: Iterable[str]) -> None:
        paths = [self._path(digest) for digest in digests]
        for first in range(0, len(paths), _BULK):
            self._delete(paths[first : first + _BULK])

    def _delete(self, paths: list[str]) -> None:
        store = self._reach()

        def one(path: str) -> None:
            try:
                obstore.delete(store, path)
            except _MISSING as error:
                if _NO_BUCKET.search(str(error)):
                    raise

        def call() -> None:
            try:
                obstore.delete(store, paths)
            except _MISSING:  # some stores say so of one that is gone, and leave the rest
                for path in paths:
                    one(path)

        self._call(call)

    def list(self) -> Iterator[BlobInfo]:
        """Ages are by this machine's clock against the store's time stamps."""
        store = self._reach()
        pages = self._call(lambda: obstore.list(store, prefix=f"{self._run}/blobs", chunk_size=1000))
        while page := self._call(lambda: next(pages, None)):
            now = time.time()
            for meta in page:
                if match := _NAME.search(meta["path"]):
                    age_s = max(0.0, now - meta["last_modified"].timestamp())
                    yield BlobInfo(match[1], meta["size"], age_s)

    def close(self) -> None:
        """Nothing to close: connections go with the object."""

    def _path(self, digest: str) -> str:
        return f"{self._run}/blobs/{digest[:2]}/{digest}"

    def _call(self, call: Callable[[], T]) -> T:
        """`call()`, its failures turned into this project's errors."""
        try:
            return call()
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise self._refused(error) from None
        except (exceptions.BaseError, OSError) as error:
            text = str(error)
            if _NO_BUCKET.search(text):
                raise ConfigError(f"{self._where} does not exist; make the bucket, or correct channel.blobs") from None
            if _REFUSED.search(text) or (isinstance(error, OSError) and error.errno in (1, 13, 30)):
                raise self._refused(error) from None
            if _FULL.search(text) or (isinstance(error, OSError) and error.errno in (28, 122)):
                raise BackpressureError(
                    f"{self._where} is full ({_reason(error)}); nothing was lost: give it more space, or lower "
                    "channel.retain_bytes"
                ) from None
            raise StreamUnavailableError(
                f"{self._where} does not answer as it should ({_reason(error)}); check that it runs, that the address "
                "is right and that this machine may reach it"
            ) from None

    def _refused(self, error: Exception) -> AnabranchError:
        return ConfigError(
            f"{self._where} refused access ({_reason(error)}); check the credentials in the environment and what they "
            "allow"
        )


def open_blob_store(config: ChannelSection, run: str) -> ObjectBlobStore | None:
    """The store that `channel.blobs` names, None when chunks are kept in the hub's Redis. Raises ConfigError."""
    if config.blobs == "redis":
        return None
    return ObjectBlobStore(config.blobs, run, options=config.blob_options)


def _shown(url: str) -> str:
    """`url` without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _reason(error: Exception) -> str:
    """The first line of an error: what follows is for the store's developers, and may hold keys and signed URLs."""
    line = str(error).partition("\n")[0].partition("<")[0].strip(" :")
    return re.sub(r"\?\S*", "?...", line)[:300] or type(error).__name__
