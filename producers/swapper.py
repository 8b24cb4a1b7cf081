"""Brings what the follower offers into the engine, between two steps, and keeps account of it.

Invariant: an update is held (the mirror stands still) from the moment the engine begins to work on it until it is
confirmed or rejected, and that is bounded in time. A refused swap leaves the old version serving and says why; a swap that
failed while writing, or a live engine that is not what it claims, ends the process: it must not sample another token.
With `kv_policy = new_requests_only` an update waits until no request runs, and `settling` asks to start no more.
Held by tests/unit/producers/test_swapper.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from anabranch.producers.engine import EngineState, RolloutEngine
from anabranch.producers.weight_follower import Staged, WeightFollower, changed_elements
from anabranch.schemas.config import ProducerSection
from anabranch.schemas.errors import AnabranchError, ConfigError, DeadlineError, DeltaError, ModelMismatchError

HOLD_DEADLINE_S = (
    15.0  # for the engine to work an update out; other producers of the node wait for the mirror meanwhile
)


class Swapper:
    """Used by the engine's thread; its figures may be read by others."""

    def __init__(
        self,
        engine: RolloutEngine,
        follower: WeightFollower,
        config: ProducerSection,
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._engine, self._follower, self._config, self._clock_ms = engine, follower, config, clock_ms
        self._held: Staged | None = None
        self._held_since_s = 0.0
        self.swaps = self.served_since_ms = 0
        self.pause_ms = self.publish_to_serve_ms = 0.0
        self.error = ""
        self.verified = ("", "", "")  # token of the request, version, digest of the live engine
        self.verify_error = ""
        self._log = structlog.get_logger()

    @property
    def settling(self) -> bool:
        """Start no request: an update waits until those that run have ended, or is being worked on."""
        waits = self._config.kv_policy == "new_requests_only" and self._follower.staged() is not None
        return waits or (self._held is not None and not self._engine.has_unfinished)

    @property
    def blocked(self) -> bool:
        """There is an update, but the mirror is being written at this moment: look again a little later."""
        return self._held is None and self._follower.staged() is not None and not self._engine.has_unfinished

    @property
    def busy(self) -> bool:
        """An update is being worked on, and comes within a few steps."""
        return self._held is not None

    def turn(self) -> None:
        """Swap if there is something to swap in and the engine is ready for it."""
        staged = self._held or self._take()
        if staged is None:
            return
        try:
            mirror = self._follower.mirror
            if self._engine.has_unfinished and not self._engine.prepare(mirror, staged.policy, staged.changed):
                if time.monotonic() - self._held_since_s < HOLD_DEADLINE_S:
                    return
                raise DeadlineError.waiting_for(
                    f"the engine to work out the update to {staged.policy}", HOLD_DEADLINE_S
                )
            report = self._engine.swap(mirror, staged.policy, staged.changed)
        except ConfigError:
            raise
        except AnabranchError as error:
            if self._engine.state is EngineState.BROKEN:
                raise  # its weights are of no version: without this it would hold its permits and never sample again
            self._refused(staged, error)
            return
        self._held = None
        self._follower.confirm(staged)
        self.swaps += 1
        self.error = ""
        self.served_since_ms = self._clock_ms()
        self.pause_ms = report.pause_s * 1e3
        self.publish_to_serve_ms = float(max(0, self.served_since_ms - staged.published_ms))
        self._log.debug(
            "serving",
            policy=str(staged.policy),
            pause_ms=round(self.pause_ms, 2),
            elements=changed_elements(staged.changed, mirror),
            path=staged.path,
        )
        every = self._config.verify_every_updates
        if every and self.swaps % every == 0:
            self.verify_now()

    def verify_now(self, token: str = "") -> str:
        """Compute the digest of the weights that the engine serves; `token` names the request it answers.

        Raises:
            DeltaError: it is not the digest of the version that it claims to serve.
            ModelMismatchError: it cannot be computed.
        """
        serving = self._follower.serving
        assert serving is not None, "nothing is served yet"
        live = self._engine.live_digest()
        self.verified = token or self.verified[0], str(serving.policy), live
        if live != serving.digest:
            raise DeltaError(
                f"the live engine's weights have digest {live}, the channel says {serving.digest} for {serving.policy}"
            )
        return live

    def answer(self, token: str) -> None:
        """Answer a request to verify, once: with the digest, or with why it cannot be computed. Raises as `verify_now`."""
        if token == self.verified[0] or self.busy or self._follower.serving is None:
            return
        try:
            self.verify_now(token)
            self.verify_error = ""
        except ModelMismatchError as error:  # there is no way back from what the engine computes with
            self.verify_error = str(error)
            self.verified = token, str(self._follower.serving.policy), ""

    def _take(self) -> Staged | None:
        if self._follower.staged() is None:
            return None
        if self._config.kv_policy == "new_requests_only" and self._engine.has_unfinished:
            return None
        self._held, self._held_since_s = self._follower.hold(), time.monotonic()
        return self._held

    def _refused(self, staged: Staged, error: AnabranchError) -> None:
        self._held = None
        said = f"swap to {staged.policy} refused: {error}"
        if said != self.error:  # it is tried again every few seconds
            self._log.error(
                "swap refused; the old version goes on serving", policy=str(staged.policy), error=str(error)
            )
        self.error = said
        self._follower.reject(staged, str(error))
