"""The environment vLLM is imported under: set before the import, or refused."""

from __future__ import annotations

import os

import pytest

from anabranch.producers.vllm_setup import CACHE_VARIABLE, configure_environment
from anabranch.schemas.config import ProducerSection
from anabranch.schemas.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180), pytest.mark.usefixtures("recompute_lab")]


def test_it_reports_to_nobody_and_loads_no_plugins() -> None:
    from vllm import envs
    from vllm.usage.usage_lib import is_usage_stats_enabled

    assert not is_usage_stats_enabled()
    assert not any(envs.VLLM_PLUGINS)
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is False


def test_children_of_the_process_inherit_no_preloaded_libraries() -> None:
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize("variable", ["VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"])
def test_too_late_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    configure_environment(ProducerSection())  # again: nothing to change
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=variable):
        configure_environment(ProducerSection())


def test_caches_go_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/some where/cache")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    configure_environment(ProducerSection())
    assert os.environ["VLLM_CACHE_ROOT"] == "/some where/cache/vllm"
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ[name])  # so that it is undone


def test_another_device_than_configured_is_refused(recompute_lab: object) -> None:
    from anabranch.producers.vllm_setup import build_engine

    with pytest.raises(ConfigError, match=r"producer\.device = cuda, but this vLLM runs on 'cpu'"):
        build_engine(recompute_lab.model_dir, ProducerSection(device="cuda"), 0)  # type: ignore[attr-defined]
