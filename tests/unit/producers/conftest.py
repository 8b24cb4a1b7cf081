"""What tests of producers leave behind ends with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spools import closed_after


@pytest.fixture(autouse=True)
def _spools_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with closed_after(monkeypatch):
        yield
