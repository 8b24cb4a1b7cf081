"""Swapping weights into a stock vLLM server: `RolloutEngine.swap`, over HTTP.

Invariant: the server never resumes with weights of no version. An update is staged by every worker while requests run; a
refusal then leaves the old version serving. Once writing has begun, only the whole update, a reset prefix cache and the
server's own word on its version (and its digest, if asked for) lead to `resume`; after any failure in between it stays
paused until a swap of the whole state has gone through. Held by tests/e2e/test_vllm_serve.py and
tests/unit/producers/test_server_swap.py.

KV at a swap (a server does not salt its prefix cache, so it is reset):
    recompute          running requests stand still, then go on; their KV is computed anew
    new_requests_only  running requests end under the old weights first, new ones queue up meanwhile
    keep               running requests keep old KV; only for a server started with --no-enable-prefix-caching
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable
from pathlib import Path

from anabranch.producers.checkpoint import first_difference
from anabranch.producers.mirror import Mirror
from anabranch.producers.update_message import Changed, Image, UpdateMemory
from anabranch.producers.vllm_server import VllmServer
from anabranch.schemas.errors import (
    AnabranchError,
    ConfigError,
    DeadlineError,
    DeltaError,
    ModelMismatchError,
    TemporaryError,
)
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion

ATTACH_DEADLINE_S = 600.0  # the server compares its weights with the checkpoint on disk
STAGE_DEADLINE_S = 60.0
WRITE_DEADLINE_S = 120.0  # of one call while the server is paused
DRAIN_DEADLINE_S = 300.0  # new_requests_only: for running requests to end
POLL_S = 0.005


class SwapState(enum.Enum):
    DETACHED = "detached"  # the server is not known, or has been restarted
    ATTACHED = "attached"  # serves the weights of its checkpoint, or some version we do not know
    SERVING = "serving"
    TORN = "torn"  # a swap failed while writing: the server is paused until one succeeds


class ServerSwap:
    """Owns the connection to one server. Not thread-safe."""

    def __init__(
        self,
        server: VllmServer,
        model_dir: Path,
        layout: Layout,
        *,
        kv_policy: str = "recompute",
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._server, self._model_dir, self._layout, self._kv_policy = server, model_dir, layout, kv_policy
        self._sleep = sleep
        self._memory = UpdateMemory()
        self.state = SwapState.DETACHED
        self.policy: PolicyVersion | None = None

    def attach(self) -> None:
        """Make the server ready for updates: of all weights first, whatever it serves now.

        Raises:
            ConfigError: it lacks the backend or development mode, has data-parallel replicas, or would serve stale KV.
            ModelMismatchError: it serves another checkpoint than `model_dir`.
            TemporaryError: it cannot be reached.
        """
        self._detach()
        if (replicas := self._server.replicas()) != 1:
            raise ConfigError(
                f"{self._server.url} has {replicas} data-parallel replicas: follow each by a server of its own"
            )
        if self._kv_policy == "keep" and any(w["prefix_caching"] for w in self._describe()):
            raise ConfigError(
                f"{self._server.url} caches prefixes, whose KV a new version must not find: start it with "
                "--no-enable-prefix-caching, or choose kv_policy recompute"
            )
        self._server.ask("anabranch_attach", model_dir=str(self._model_dir), deadline_s=ATTACH_DEADLINE_S)
        self.state = SwapState.ATTACHED

    def check_server(self) -> None:
        """Look whether it is still the server that was attached, and serves what was swapped in last; if it was restarted,
        `state` is DETACHED then. Raises TemporaryError if it does not answer."""
        if self.state is SwapState.SERVING:
            known = self._server.weight_version() == str(self.policy)
        else:
            known = self.state is SwapState.DETACHED or all(w["attached"] for w in self._describe())
        if not known:
            self._detach()

    def swap(self, mirror: Image, policy: PolicyVersion, changed: Changed, *, verify: str | None = None) -> float:
        """Serve the state in `mirror` as `policy`.

        Args:
            changed: as for `RolloutEngine.swap`; the first swap after `attach` and any after a failed one is of everything.
            verify: also compare the digest of the live weights with this one before requests go on.

        Returns:
            Seconds from pausing to resuming.

        Raises:
            ModelMismatchError, DeltaError, TemporaryError: refused or failed while staging; the old version serves on.
            TemporaryError, DeltaError with `state` TORN: failed while writing; the server stays paused.
        """
        if self.state is SwapState.DETACHED:
            raise AnabranchError(f"{self._server.url} is not attached")
        if mirror.layout.hash != self._layout.hash:
            raise ModelMismatchError(first_difference(self._layout, mirror.layout))
        if self.state is SwapState.TORN:  # the server may still be in the midst of an update
            self._server.ask("anabranch_attach", model_dir=str(self._model_dir), deadline_s=ATTACH_DEADLINE_S)
        message = self._memory.message(
            mirror, changed if self.state is SwapState.SERVING else dict.fromkeys(self._layout.by_name)
        )
        self._stage(message)
        started = time.perf_counter()
        self._pause()
        try:
            self._server.start_weight_update()
            self._server.update_weights(message)
            self._server.finish_weight_update(str(policy), deadline_s=WRITE_DEADLINE_S)
            if self._kv_policy != "keep":
                self._server.reset_prefix_cache()
            told = self._server.weight_version()
            if told != str(policy):
                raise TemporaryError(f"{self._server.url} says that it serves {told}, not {policy}")
            if verify is not None and (live := self.live_digest()) != verify:
                raise DeltaError(f"{self._server.url}: digest of the live weights {live}, of {policy} {verify}")
            self._server.resume()
        except BaseException:
            self.state, self.policy = SwapState.TORN, None
            raise
        self.state, self.policy = SwapState.SERVING, policy
        return time.perf_counter() - started

    def live_digest(self) -> str:
        """Root digest of the weights that the server computes with, mapped back to the checkpoint. It computes nothing else
        meanwhile.

        Raises:
            ModelMismatchError: they are not exact in the checkpoint's dtype, or there is no way back.
        """
        live = Mirror(self._layout)
        try:
            self._server.ask(
                "anabranch_export_live", path=live.path, layout_hash=self._layout.hash, deadline_s=WRITE_DEADLINE_S
            )
            return live.digest()
        finally:
            live.close()

    def close(self) -> None:
        self._memory.close()

    def _describe(self) -> list[dict[str, bool]]:
        """`anabranch_describe` of every worker."""
        workers = self._server.answers("anabranch_describe")
        return [{k: bool(w.get(k)) for k in ("prefix_caching", "attached")} for w in workers if isinstance(w, dict)]

    def _detach(self) -> None:
        self.state, self.policy = SwapState.DETACHED, None

    def _stage(self, message: dict[str, object]) -> None:
        """Every worker works out its writes, beside the requests that run."""
        try:
            self._server.ask("anabranch_stage", update_info=message, background=True)
            give_up_s = time.monotonic() + STAGE_DEADLINE_S
            while not self._server.ask("anabranch_staged"):
                if time.monotonic() > give_up_s:
                    raise DeadlineError.waiting_for(f"{self._server.url} to stage an update", STAGE_DEADLINE_S)
                self._sleep(POLL_S)
        except AnabranchError:  # others may have staged it
            with contextlib.suppress(AnabranchError):
                self._server.ask("anabranch_cancel")
            raise

    def _pause(self) -> None:
        """Raises what went wrong; a server with weights of a version is asked to go on then."""
        waits = self._kv_policy == "new_requests_only"
        try:
            self._server.pause("wait" if waits else "keep", deadline_s=DRAIN_DEADLINE_S if waits else None)
        except AnabranchError:
            if self.state is not SwapState.TORN:
                with contextlib.suppress(AnabranchError):
                    self._server.resume()
            with contextlib.suppress(AnabranchError):
                self._server.ask("anabranch_cancel")
            raise
