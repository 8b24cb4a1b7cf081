"""Passwords never leave the process in text: every `scheme://user:password@host` loses its password.

Invariant: `redact_text` leaves no password of a URL in its result, wherever in the text the URL stands. Where a URL
ends is not always clear (a password may hold any character but a space): then too much is hidden, never too little.
Held by tests/unit/transport/test_log.py.
"""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@]*:)\S*@")
_IN_QUERY = re.compile(r"(?i)(password=)[^&#\s]*")


def redact_text(text: str) -> str:
    """`text` with the password of every URL in it (`user:password@`, `?password=`) replaced by `***`."""
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


def redact_value(value: object) -> object:
    """`value` with every string in it redacted, inside lists, tuples and dicts too; exceptions become their text."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {redact_value(k): redact_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact_value(v) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact_text(str(value))
