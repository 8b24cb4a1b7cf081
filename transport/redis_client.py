"""One way to reach a Redis: bounded in time, and failing with errors of this project.

Invariant: no call outlasts its socket time-out plus `PATIENCE_S`; what fails is a StreamUnavailableError (not
reachable), a BackpressureError (full) or a ConfigError (credentials), naming the server without its password.
A call is repeated only where repeating is harmless: redis-py's own retries are off, since a repeated XADD stores
twice and a repeated XREADGROUP loses what the first reply carried. Held by tests/contract/test_unreachable.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from anabranch.schemas.config import StreamSection
from anabranch.schemas.errors import AnabranchError, BackpressureError, ConfigError, StreamUnavailableError, redact_url
from anabranch.transport.resp_packer import RespPacker
from anabranch.transport.retry import backoff_s

T = TypeVar("T")

PATIENCE_S = 2.0  # how long a call that may be repeated is; covers a Redis restart on the spot
_TRANSIENT = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.MasterDownError)
_CREDENTIALS = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
_FULL = re.compile(r"\A(OOM|MISCONF|NOREPLICAS)\b")
_SCRIPT_DENIED = re.compile(r"user executing the script can't|ACL failure in script")  # Redis; Valkey
_REFUSED_COMMAND = "refused a command to this user (its ACL; see deploy/redis/*.conf)"
_BUSY = re.compile(r"\ABUSY\b")  # a script has run for five seconds; it ends, or somebody ends it
_STRANGE = re.compile(
    r"WRONGTYPE|is not an integer|is not a valid float|attempt to (compare|perform arithmetic|concatenate|index|call)"
)
_READ_BYTES = 256 * 2**10  # asked of the socket at a time: entries are large
_SOMEBODY = "somebody else wrote to a key of this run"
_VERSION = "it must be Redis 7.0 or later, or Valkey"
ADVICE = "check that it runs, that the address is right and that this machine may reach it"


class Timeouts(Protocol):
    """What of `schemas.config.StreamSection` concerns a connection."""

    @property
    def socket_timeout_ms(self) -> int: ...


def open_client(url: str, *, stream: Timeouts | None = None, deadline_s: float, what: str) -> redis.Redis:
    """A client that has not spoken to its server yet; arguments as `connect`. Raises ConfigError: an unusable URL."""
    timeout_s = (stream or StreamSection()).socket_timeout_ms / 1000
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, max(0.1, deadline_s)),
            socket_keepalive=True,
            socket_read_size=_READ_BYTES,
            command_packer=RespPacker(),
            retry=Retry(NoBackoff(), 0),
            legacy_responses=False,
            decode_responses=False,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{what}: {redact_url(url)} is not a usable Redis URL ({type(error).__name__})") from None


def connect(url: str, *, stream: Timeouts | None = None, deadline_s: float, what: str) -> redis.Redis:
    """A client whose server has answered PING. Replies are bytes; XREADGROUP gives `{stream: [(id, fields)]}`.

    Args:
        url: redis://, rediss:// or unix:// URL.
        stream: socket time-outs; default those of `StreamSection`.
        deadline_s: how long to wait for the server's first answer.
        what: the server's role, for messages, such as "the hub" or "the Redis of region eu".

    Raises:
        StreamUnavailableError: no answer by the deadline.
        ConfigError: the URL is unusable or the server refuses its credentials.
    """
    client = open_client(url, stream=stream, deadline_s=deadline_s, what=what)
    shown = redact_url(url)
    end = time.monotonic() + deadline_s
    attempt = 0
    while True:
        try:
            client.ping()
            return client
        except _CREDENTIALS as error:
            client.close()
            raise ConfigError(f"{what} at {shown} {_refused(error)}: {error}") from None
        except exceptions.RedisError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                client.close()
                raise StreamUnavailableError(
                    f"no answer from {what} at {shown} within {deadline_s:.1f} s ({error}); {ADVICE}"
                ) from error
            time.sleep(min(left_s, backoff_s(attempt, cap_s=0.5)))
            attempt += 1


def address(client: redis.Redis) -> str:
    """The server's URL as far as it may be shown."""
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    user = f"{options.get('username') or ''}:***@" if options.get("password") else ""
    scheme = "rediss" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else "redis"
    return f"{scheme}://{user}{options.get('host')}:{options.get('port')}/{options.get('db') or 0}"


class Guard:
    """Runs calls to one server and turns their failures into this project's errors."""

    def __init__(self, client: redis.Redis, what: str) -> None:
        self._where = f"{what} at {address(client)}"
        timeout_s = client.connection_pool.connection_kwargs.get("socket_timeout")
        self._patience = f", stream.socket_timeout_ms = {1000 * timeout_s:.0f}" if timeout_s else ""

    def repeat(self, call: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
        """`call()`, which must be harmless to repeat, again and again for `patience_s` while the server is away."""
        end = time.monotonic() + patience_s
        attempt = 0
        while True:
            try:
                return self.once(call)
            except StreamUnavailableError:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise
                time.sleep(min(left_s, backoff_s(attempt, cap_s=0.5)))
                attempt += 1

    def once(self, call: Callable[[], T]) -> T:
        """`call()`, tried a single time.

        Raises:
            StreamUnavailableError, BackpressureError, ConfigError: see the module.
            AnabranchError: the server answered with any other error.
        """
        try:
            return call()
        except _CREDENTIALS as error:
            raise ConfigError(f"{self._where} {_refused(error)}: {error}") from None
        except _TRANSIENT as error:
            why = f"{error}{self._patience if isinstance(error, exceptions.TimeoutError) else ''}"
            raise StreamUnavailableError(f"lost {self._where} ({why}); {ADVICE}") from error
        except exceptions.ResponseError as error:
            if isinstance(error, exceptions.OutOfMemoryError) or _FULL.match(str(error)):
                raise BackpressureError(
                    f"{self._where} takes no more data ({error}); nothing was lost: consumers must catch up, "
                    "or give it more memory or disk"
                ) from error
            if _SCRIPT_DENIED.search(str(error)):
                raise ConfigError(f"{self._where} {_REFUSED_COMMAND}: {error}") from None
            if _BUSY.match(str(error)):
                raise StreamUnavailableError(f"{self._where} is busy ({error})") from error
            advice = _SOMEBODY if _STRANGE.search(str(error)) else _VERSION
            raise AnabranchError(f"{self._where} refused a command: {error}; {advice}") from error
        except exceptions.InvalidResponse as error:
            raise StreamUnavailableError(f"{self._where} does not speak Redis ({error}); {ADVICE}") from error

    def understand(self, what: str, parse: Callable[[], T]) -> T:
        """`parse()`, which makes sense of a reply; `what` is the key that it came from.

        Raises AnabranchError: it makes none, so somebody else wrote there.
        """
        try:
            return parse()
        except AnabranchError:
            raise
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            why = (str(error).splitlines() or [""])[0][:120]
            raise AnabranchError(
                f"{self._where} keeps something in {what} that is none of ours ({type(error).__name__}: {why}); {_SOMEBODY}"
            ) from None


def whole_number(raw: bytes | int) -> int:
    """A count or an index. Raises ValueError: it is none that this project writes."""
    number = int(raw)
    if not 0 <= number < 2**53:  # beyond, Lua's numbers are not exact
        raise ValueError(f"{str(number)[:40]} is no count")
    return number


def is_missing_group(error: Exception) -> bool:
    """Whether a server's error says that the consumer group (or its stream) is not there, or went while it was waited for."""
    return str(error).startswith(("NOGROUP", "UNBLOCKED"))


def _refused(error: Exception) -> str:
    if isinstance(error, exceptions.NoPermissionError):
        return _REFUSED_COMMAND
    return "refused the credentials (check user and password)"
