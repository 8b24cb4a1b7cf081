"""Keeping DeepSpeed's own chatter out of the run's output.

Invariant: stdout carries only the run's own lines; warnings and errors of DeepSpeed's logger still reach stderr.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def import_deepspeed() -> Any:
    """DeepSpeed, with its log lines on stderr and from WARNING up (its own default is INFO on stdout)."""
    with quiet():
        import deepspeed
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own; a subclass belongs to somebody else
            handler.setStream(sys.stderr)
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While DeepSpeed starts, saves or loads: drop what it prints (memory reports), and its deprecations."""
    with contextlib.redirect_stdout(io.StringIO()), without_deprecations():
        yield


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """Drop deprecation warnings, on which only DeepSpeed could act: 0.19.8 uses `torch.jit` while it is imported, and
    at every ZeRO-3 gather collectives that torch 2.13 has renamed."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield
