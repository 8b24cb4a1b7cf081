"""Logging: one event a line on stderr, JSON for machines, coloured text for a person at a terminal.

Invariant: no password of a URL leaves the process through a log line, whatever value or traceback it stands in.
Held by tests/unit/transport/test_log.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog

from anabranch.schemas.errors import ConfigError
from anabranch.transport.redact import redact_value

LEVEL_VARIABLE = "ANABRANCH_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Unfailing:
    """A line that cannot be written (its disk is full, its reader has gone) is lost, and the service goes on."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._out.flush()


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """The level that $ANABRANCH_LOG_LEVEL asks for, "info" by default. Raises ConfigError for an unknown one."""
    level = (os.environ if environ is None else environ).get(LEVEL_VARIABLE, "info").lower()
    if level not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {level!r}; choose one of {', '.join(_LEVELS)}")
    return level


def setup_logging(service: str, *, region: str = "", level: str | None = None, stream: TextIO | None = None) -> None:
    """Send structlog's events to `stream` (default: stderr as it is now), each with its service and region.

    Args:
        service: the process's role, such as "learner".
        region: its region; left out where it has none.
        level: "debug", "info", "warning" or "error"; default: `log_level()`.
    """
    level = log_level() if level is None else level
    if level not in _LEVELS:
        raise ConfigError(f"log level {level!r}; choose one of {', '.join(_LEVELS)}")
    out = stream if stream is not None else sys.stderr
    person = out.isatty()
    about = {"service": service} | ({"region": region} if region else {})

    def name_origin(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**about, **event}

    renderer: Any = structlog.dev.ConsoleRenderer(colors=True) if person else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_origin,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if person else "iso", utc=not person),
            structlog.processors.format_exc_info,  # before `redact`: tracebacks hold URLs too
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Unfailing(out))),
        cache_logger_on_first_use=False,
    )


def redact(logger: Any, method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """A structlog processor: every value redacted."""
    return {str(key): redact_value(value) for key, value in event.items()}
