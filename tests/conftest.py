"""Fixtures shared by all tests: one real embedded Valkey per session, and a run name of its own for every test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import settings

from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from tests import scheduling

# How long one example takes says more about the machine's load than about the code; pytest-timeout bounds the test.
settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")

_numbers = itertools.count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    return scheduling.worker_count(config.args, config.option.keyword)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    for spec in specs:
        spec.python = scheduling.isolated_python()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.ByFile | None:
    return scheduling.ByFile(config, log) if config.option.dist == "load" else None  # else: as the command line says


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """A running server, shared; leave it running and keep to your own `run_name`."""
    with EmbeddedValkey(tmp_path_factory.mktemp("val key"), fsync="everysec") as server:
        yield server


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    return f"t{next(_numbers)}"


@pytest.fixture
def keys(run_name: str) -> Keys:
    return Keys(run_name)


@pytest.fixture
def client(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    made = connect(valkey.url, deadline_s=10, what="the test Valkey")
    yield made
    made.close()
