"""The order of calls at a swap, and what a failure of each of them leaves, over a server that fails where it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from anabranch.producers.mirror import Mirror
from anabranch.producers.server_swap import ServerSwap, SwapState
from anabranch.schemas.errors import AnabranchError, ConfigError, DeltaError, ModelMismatchError, TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion

LAYOUT = Layout.build([("w", "bf16", (8,)), ("x", "bf16", (4,))])
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
STAGE = ["anabranch_stage", "anabranch_staged"]
WRITE = ["pause keep", "start", "update", "finish", "reset", "version", "resume"]


class Server:
    """Notes the calls. `fails`: call -> the error it raises, once."""

    url = "http://server"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, AnabranchError] = {}
        self.version, self.staging, self.attached, self.caches = "default", 0, False, True
        self.messages: list[dict[str, Any]] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails.pop(call)

    def replicas(self) -> int:
        return 1

    def weight_version(self) -> str:
        self._note("version")
        return self.version

    def pause(self, mode: str, *, deadline_s: float | None = None) -> None:
        self._note(f"pause {mode}")

    def resume(self) -> None:
        self._note("resume")

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._note("update")
        assert update_info == self.messages[-1]

    def finish_weight_update(self, version: str, *, deadline_s: float) -> None:
        self._note("finish")
        self.version = version

    def reset_prefix_cache(self) -> None:
        self._note("reset")

    def answers(self, method: str) -> list[Any]:
        self._note(method)
        return [{"prefix_caching": self.caches, "attached": self.attached}]

    def ask(self, method: str, *, deadline_s: float | None = None, **arguments: Any) -> bool:
        self._note(method)
        if method == "anabranch_attach":
            self.attached = True
        if method == "anabranch_stage":
            self.messages.append(arguments["update_info"])
        if method == "anabranch_staged" and self.staging:
            self.staging -= 1
            return False
        return True


def build(kv_policy: str = "recompute", *, serving: bool = True) -> tuple[ServerSwap, Server, Mirror]:
    server, mirror = Server(), Mirror(LAYOUT)
    swap = ServerSwap(cast(Any, server), Path("/model"), LAYOUT, kv_policy=kv_policy, sleep=lambda _: None)
    if serving:
        swap.attach()
        swap.swap(mirror, V1, {})
        server.calls.clear()
    return swap, server, mirror


def rows(server: Server) -> list[str]:
    return [name for name, _, _ in server.messages[-1]["changed"]]


def test_requests_stand_still_only_for_the_writes() -> None:
    swap, server, mirror = build()
    server.staging = 2
    swap.swap(mirror, V2, {"w": np.array([1])})
    assert server.calls == ["anabranch_stage", *["anabranch_staged"] * 3, *WRITE]
    assert (swap.state, swap.policy, rows(server)) == (SwapState.SERVING, V2, ["w"])


def test_the_first_swap_is_of_everything() -> None:
    swap, server, mirror = build(serving=False)
    with pytest.raises(AnabranchError, match="not attached"):
        swap.swap(mirror, V1, {})
    swap.attach()
    swap.swap(mirror, V1, {"w": np.array([1])})
    assert rows(server) == ["w", "x"]


@pytest.mark.parametrize("call", STAGE)
def test_a_refusal_while_staging_is_given_up_by_all_workers(call: str) -> None:
    swap, server, mirror = build()
    server.fails[call] = DeltaError("an index")
    with pytest.raises(DeltaError):
        swap.swap(mirror, V2, {"w": np.array([1])})
    assert server.calls[-1] == "anabranch_cancel"
    assert not {"pause keep", "finish"} & set(server.calls)
    assert (swap.state, swap.policy) == (SwapState.SERVING, V1)


def test_a_pause_that_fails_is_undone() -> None:
    swap, server, mirror = build()
    server.fails["pause keep"] = TemporaryError("slow")
    with pytest.raises(TemporaryError):
        swap.swap(mirror, V2, {})
    assert server.calls[-2:] == ["resume", "anabranch_cancel"]
    assert (swap.state, swap.policy) == (SwapState.SERVING, V1)


@pytest.mark.parametrize("call", WRITE[1:])
def test_a_failure_while_writing_keeps_it_paused_and_the_next_swap_is_of_everything(call: str) -> None:
    swap, server, mirror = build()
    server.fails[call] = TemporaryError("gone")
    with pytest.raises(TemporaryError):
        swap.swap(mirror, V2, {"w": np.array([1])})
    assert server.calls[-1] == call
    assert (swap.state, swap.policy) == (SwapState.TORN, None)
    server.fails["anabranch_stage"] = DeltaError("no")
    with pytest.raises(DeltaError):
        swap.swap(mirror, V2, {"w": np.array([1])})
    server.fails["pause keep"] = TemporaryError("slow")
    with pytest.raises(TemporaryError):
        swap.swap(mirror, V2, {"w": np.array([1])})
    assert "resume" not in server.calls[server.calls.index(call) + 1 :], "its weights are of no version yet"
    server.calls.clear()
    swap.swap(mirror, V2, {"w": np.array([1])})
    assert server.calls == ["anabranch_attach", *STAGE, *WRITE]
    assert (swap.state, rows(server)) == (SwapState.SERVING, ["w", "x"])


def test_a_server_that_confirms_another_version_is_not_served() -> None:
    swap, server, mirror = build()
    server.finish_weight_update = lambda version, **_: None  # type: ignore[method-assign,assignment]
    with pytest.raises(TemporaryError, match=r"says that it serves e1\.v1, not e1\.v2"):
        swap.swap(mirror, V2, {})
    assert "resume" not in server.calls


def test_a_restart_is_noticed_in_every_state() -> None:
    swap, server, _mirror = build()
    swap.check_server()
    assert swap.state is SwapState.SERVING
    server.version = "default"
    swap.check_server()
    assert swap.state is SwapState.DETACHED
    swap.attach()
    server.attached = False
    swap.check_server()
    assert swap.state is SwapState.DETACHED


def test_a_mirror_of_another_layout_is_refused_before_anything_is_asked() -> None:
    swap, server, _ = build()
    with pytest.raises(ModelMismatchError, match="'x'"):
        swap.swap(Mirror(Layout.build([("w", "bf16", (8,))])), V2, {})
    assert server.calls == []


def test_kv_policies() -> None:
    swap, server, mirror = build("new_requests_only")
    swap.swap(mirror, V2, {})
    assert server.calls == [*STAGE, "pause wait", *WRITE[1:]]
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        build("keep")
    swap, server, mirror = build("keep", serving=False)
    server.caches = False
    swap.attach()
    swap.swap(mirror, V2, {})
    assert "reset" not in server.calls


def test_replicas_are_refused() -> None:
    swap, server, _ = build(serving=False)
    server.replicas = lambda: 2  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="2 data-parallel replicas"):
        swap.attach()
