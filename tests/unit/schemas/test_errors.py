"""The tree carries exit codes; a password given in any form of URL never comes back out."""

from __future__ import annotations

import pickle

import pytest

from anabranch.schemas import errors
from anabranch.schemas.errors import (
    AnabranchError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    StreamUnavailableError,
    TemporaryError,
    TrajectoryError,
    UnsafeSamplingError,
    UsageError,
    WireError,
    redact_url,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (AnabranchError, 70), (UsageError, 2), (ConfigError, 78), (UnsafeSamplingError, 78), (TemporaryError, 75),
        (DeadlineError, 75), (StreamUnavailableError, 75), (WireError, 76), (TrajectoryError, 76), (CheckpointError, 78),
    ],
)  # fmt: skip
def test_exit_codes(kind: type[AnabranchError], code: int) -> None:
    assert kind("x").exit_code == code


def test_errors_are_builtin_errors_too() -> None:
    assert issubclass(DeadlineError, TimeoutError)
    assert issubclass(StreamUnavailableError, ConnectionError)
    assert issubclass(ConfigError, ValueError)


def test_every_error_stands_in_the_drawn_tree_and_crosses_processes() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, AnabranchError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.__name__ in (errors.__doc__ or "")
        copy = pickle.loads(pickle.dumps(kind("what happened")))
        assert (type(copy), str(copy)) == (kind, "what happened")


def test_a_deadline_names_what_it_waited_for() -> None:
    error = DeadlineError.waiting_for("the hub", 1.25, "is it running?")
    assert str(error) == "gave up after 1.2 s waiting for the hub; is it running?"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:s3cret@127.0.0.1:6379/0", "redis://:***@127.0.0.1:6379/0"),
        ("rediss://user:s3cret@redis.example:6380", "rediss://user:***@redis.example:6380"),
        ("redis://user@host:1/2", "redis://user@host:1/2"),
        ("redis://:s3cret@[::1]:6379/0", "redis://:***@[::1]:6379/0"),
        ("redis://:s3cret@Host.Example:6379/0?db=1#f", "redis://:***@Host.Example:6379/0?db=1#f"),
        ("unix://:s3cret@/run/redis.sock?db=1", "unix://:***@/run/redis.sock?db=1"),
        ("redis://host:6379/0?password=s3cret&db=1", "redis://host:6379/0?password=***&db=1"),
        ("", ""),
        ("nonsense", "nonsense"),
    ],
)
def test_urls_lose_their_password_and_nothing_else(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        ":s3cret@127.0.0.1:6379",  # the scheme was forgotten
        "user:s3cret@127.0.0.1:6379/0",
        "redis:/:s3cret@host:1",
        "redis://:s3cret@host:notaport/0",
        "redis://:s3cret@[host:1",
        "redis://:s3c/ret@host:1",  # not percent-encoded, as people paste it
        "redis://:s3c@ret@host:1",
        "redis://:s3c#ret?@host:1",
        "redis://user:a:s3cret@host",
        "redis://host:1?PASSWORD=s3cret",
    ],
)
def test_a_malformed_url_does_not_show_it_either(url: str) -> None:
    shown = redact_url(url)
    for part in ("s3c", "ret@"):
        assert part not in shown
    assert "***" in shown
