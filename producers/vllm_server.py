"""The HTTP endpoints of a stock vLLM server that a weight update needs (its development mode has them).

Invariant: every call has a deadline, nothing is retried here, and what goes wrong is a named error: `ConfigError` for a server
that was started without what we need, the worker's own refusal for what an engine refuses, `TemporaryError` for the rest.
Held by tests/unit/producers/test_vllm_server.py and tests/e2e/test_vllm_serve.py.
"""

from __future__ import annotations

from typing import Any

import httpx

from anabranch.producers.update_message import STAGING
from anabranch.schemas import errors
from anabranch.schemas.errors import AnabranchError, ConfigError, DeadlineError, TemporaryError

DEADLINE_S = 30.0
SHOWN = 500  # characters of a server's own message


class VllmServer:
    """One server, used by one thread."""

    def __init__(
        self, url: str, *, deadline_s: float = DEADLINE_S, transport: httpx.BaseTransport | None = None
    ) -> None:
        """`url` such as http://127.0.0.1:8000; `deadline_s` for each call that is not given another; `transport`: in
        place of connections, for tests."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an http:// or https:// URL of a vLLM server")
        self.url, self._deadline_s = url.rstrip("/"), deadline_s
        # The server closes idle connections after 5 s: one that is about to be closed is not used again.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._client = httpx.Client(base_url=self.url, limits=limits, trust_env=False, transport=transport)

    def weight_version(self) -> str:
        """What the server says it serves: "default" until a first update was finished."""
        return str(self._call("GET", "/weight_info").get("weight_version"))

    def replicas(self) -> int:
        """Data-parallel replicas behind this address."""
        sizes = [
            int(self._call("GET", "/get_world_size", params={"include_dp": dp}).get("world_size", 0))
            for dp in ("true", "false")
        ]
        return sizes[0] // max(1, sizes[1])

    def pause(self, mode: str, *, deadline_s: float | None = None) -> None:
        """`mode` keep: running requests stand still; wait: they end first. New ones queue up either way."""
        self._call("POST", "/pause", params={"mode": mode, "clear_cache": "false"}, deadline_s=deadline_s)

    def resume(self) -> None:
        self._call("POST", "/resume")

    def start_weight_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": update_info})

    def finish_weight_update(self, version: str, *, deadline_s: float | None = None) -> None:
        self._call("POST", "/finish_weight_update", json={"weight_version": version}, deadline_s=deadline_s)

    def reset_prefix_cache(self) -> None:
        """Forget all KV, that of running requests too: they compute it anew."""
        asked = {"reset_running_requests": "true", "reset_external": "true"}
        if self._call("POST", "/reset_prefix_cache", params=asked).get("success") is not True:
            raise TemporaryError(f"{self.url} could not reset its prefix cache")

    def ask(self, method: str, *, deadline_s: float | None = None, **kwargs: object) -> bool:
        """Call `method` of AnabranchWorkerExtension on every worker; False if one is still staging.

        Raises what the first worker that refuses says.
        """
        answers = self.answers(method, deadline_s=deadline_s, **kwargs)
        for answer in answers:
            if answer is not None and answer != STAGING:
                raise _refusal(answer)
        return STAGING not in answers

    def answers(self, method: str, *, deadline_s: float | None = None, **kwargs: object) -> list[Any]:
        answer = self._call("POST", "/collective_rpc", json={"method": method, "kwargs": kwargs}, deadline_s=deadline_s)
        results = answer.get("results")
        return results if isinstance(results, list) else []

    def close(self) -> None:
        self._client.close()

    def _call(self, verb: str, path: str, *, deadline_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            response = self._client.request(verb, path, timeout=deadline_s, **arguments)
        except httpx.TimeoutException as error:
            raise DeadlineError.waiting_for(f"{self.url}{path} to answer", deadline_s) from error
        except httpx.HTTPError as error:
            raise TemporaryError(f"{self.url}{path} cannot be reached: {error}") from error
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(
                f"{self.url} has no {path}: start that vLLM server with VLLM_SERVER_DEV_MODE=1 (docs/vllm-plugin.md)"
            )
        if not response.is_success:
            raise _failure(f"{self.url}{path}", response)
        try:
            answer = response.json()
        except ValueError as error:
            raise TemporaryError(f"{self.url}{path} answers with what is no JSON: is it a vLLM server?") from error
        return answer if isinstance(answer, dict) else {}


def _failure(where: str, response: httpx.Response) -> AnabranchError:
    try:
        told = response.json()["error"]
        message = str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError, TypeError):
        message = response.text
    if "object has no attribute 'anabranch_" in message or "Weight transfer not configured" in message:
        return ConfigError(
            f"{where}: that vLLM server does not use the backend: install anabranch beside vLLM and start it with "
            """--weight-transfer-config '{"backend": "anabranch"}' (docs/vllm-plugin.md)"""
        )
    return TemporaryError(f"{where} answers {response.status_code}: {message[:SHOWN]}")


def _refusal(answer: object) -> AnabranchError:
    if isinstance(answer, list) and len(answer) == 2:
        kind = getattr(errors, str(answer[0]), None)
        if isinstance(kind, type) and issubclass(kind, AnabranchError):
            return kind(str(answer[1]))
    return TemporaryError(f"a worker answers {str(answer)[:SHOWN]!r}")
