"""What a vLLM server's answers are taken for, over a transport that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from anabranch.producers.vllm_server import VllmServer
from anabranch.schemas.errors import AnabranchError, ConfigError, DeadlineError, DeltaError, TemporaryError


def answering(handler: Callable[[httpx.Request], httpx.Response]) -> VllmServer:
    return VllmServer("http://127.0.0.1:1/", transport=httpx.MockTransport(handler))


def failing(status: int, body: str) -> VllmServer:
    return answering(lambda request: httpx.Response(status, text=body))


def error(message: str) -> str:
    return json.dumps({"error": {"message": message, "code": 500}})


def test_calls_are_those_of_vllms_routers() -> None:
    seen: list[tuple[str, str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else dict(request.url.params)
        seen.append((request.method, request.url.path, body))
        return httpx.Response(200, json={"success": True, "weight_version": "e1.v2", "results": [None, None]})

    server = answering(handler)
    assert server.weight_version() == "e1.v2"
    server.pause("keep")
    server.start_weight_update()
    server.update_weights({"a": 1})
    server.finish_weight_update("e1.v3")
    server.reset_prefix_cache()
    server.resume()
    assert server.ask("anabranch_stage", update_info={"b": 2})
    assert seen == [
        ("GET", "/weight_info", {}),
        ("POST", "/pause", {"mode": "keep", "clear_cache": "false"}),
        ("POST", "/start_weight_update", {}),
        ("POST", "/update_weights", {"update_info": {"a": 1}}),
        ("POST", "/finish_weight_update", {"weight_version": "e1.v3"}),
        ("POST", "/reset_prefix_cache", {"reset_running_requests": "true", "reset_external": "true"}),
        ("POST", "/resume", {}),
        ("POST", "/collective_rpc", {"method": "anabranch_stage", "kwargs": {"update_info": {"b": 2}}}),
    ]


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (404, "", ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        (500, error("Worker failed with error ''CPUWorker' object has no attribute 'anabranch_stage''"), ConfigError,
         "weight-transfer-config"),
        (500, error("Weight transfer not configured."), ConfigError, "weight-transfer-config"),
        (500, error("EngineCore died"), TemporaryError, "answers 500: EngineCore died"),
        (400, json.dumps({"error": "no such mode"}), TemporaryError, "answers 400: no such mode"),
        (502, "<html>" + 10_000 * "x", TemporaryError, "answers 502: <html>xxx"),
        (200, "hello", TemporaryError, "no JSON"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_do_it_is_a_named_error(
    status: int, body: str, kind: type[AnabranchError], said: str
) -> None:
    with pytest.raises(kind, match=said) as refused:
        failing(status, body).ask("anabranch_stage")
    assert len(str(refused.value)) < 1000
    assert "http://127.0.0.1:1/collective_rpc" in str(refused.value) or status == 404


def test_no_answer_names_whom_it_waits_for_and_how_long() -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"]["read"] == 7.0
        raise httpx.ReadTimeout("", request=request)

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(DeadlineError, match=r"7\.0 s|7 s"):
        answering(slow).ask("anabranch_stage", deadline_s=7.0)
    with pytest.raises(TemporaryError, match="cannot be reached: refused"):
        answering(gone).weight_version()


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([None, None], True),
        ([None, ["staging"]], False),
        ([None, ["DeltaError", "an index"]], DeltaError),
        ([["AnabranchError", "why"]], AnabranchError),
        ([["OSError", "not one of ours"]], TemporaryError),
        ([["os"]], TemporaryError),
        (["some text"], TemporaryError),
    ],
)
def test_one_worker_that_refuses_refuses_for_all(answers: list[object], outcome: bool | type[Exception]) -> None:
    server = answering(lambda request: httpx.Response(200, json={"results": answers}))
    if isinstance(outcome, bool):
        assert server.ask("anabranch_staged") is outcome
    else:
        with pytest.raises(outcome):
            server.ask("anabranch_staged")


def test_a_cache_that_could_not_be_reset_is_an_error() -> None:
    with pytest.raises(TemporaryError, match="prefix cache"):
        failing(200, '{"success": false}').reset_prefix_cache()


def test_replicas_are_told_from_ranks_of_one_engine() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"world_size": 8 if request.url.params["include_dp"] == "true" else 2})

    assert answering(handler).replicas() == 4


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="'localhost:8000' is not"):
        VllmServer("localhost:8000")
