"""`anabranch follow`: keeps the weights of a stock vLLM server those of a run.

Invariant: the follower confirms only what the server has confirmed. A server that was restarted is noticed and gets the
whole state again; one that stays away longer than a deadline, or stays paused after a failed swap in spite of
`TORN_TRIES` repairs, ends this process with a code that has it restarted. Held by tests/unit/producers/test_serve_follower.py and
tests/e2e/test_vllm_serve.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.mirror import layout_of_checkpoint
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.producers.server_swap import ServerSwap, SwapState
from anabranch.producers.vllm_server import VllmServer
from anabranch.producers.weight_follower import Staged, WeightFollower
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import (
    AnabranchError,
    ConfigError,
    DeadlineError,
    StreamUnavailableError,
    TemporaryError,
    UsageError,
)
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.log import setup_logging
from anabranch.transport.runtime import StopSignal, run_service, sd_notify
from anabranch.transport.signing import Verifier
from anabranch.transport.wiring import connect_hub, connect_weights

WAIT_S = 0.5  # for an update, between two looks at the server
RETRY_S = 1.0
TORN_TRIES = 5
STATUS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """`verify_every`: compare the digest of the live weights at every so many updates, 0 never. `server_deadline_s`: how
    long a server that does not answer is waited for."""

    url: str
    kv_policy: str = "recompute"
    verify_every: int = 0
    server_deadline_s: float = 600.0


class ServerLoop:
    """One thread. `make_follower` makes one that has confirmed nothing, so that it offers the whole state."""

    def __init__(
        self,
        swap: ServerSwap,
        make_follower: Callable[[], WeightFollower],
        options: FollowOptions,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._swap, self._make_follower, self._options = swap, make_follower, options
        self._sleep, self._clock_ms = sleep, clock_ms
        self.follower: WeightFollower | None = None
        self.swaps = self.served_since_ms = self._torn = 0
        self.pause_ms = self.publish_to_serve_ms = 0.0
        self.error = ""
        self.verified = ("", "")  # version, digest
        self._away_since: float | None = None
        self._log = structlog.get_logger()

    def turn(self) -> None:
        """Look at the server, and swap in what there is.

        Raises:
            ConfigError: the server cannot be followed as it was started.
            DeadlineError: it has not answered for too long.
            AnabranchError: it stays paused, with weights of no version.
        """
        try:
            self._swap.check_server()
            if self._swap.state is SwapState.DETACHED:
                self._attach()
        except ConfigError:
            raise
        except AnabranchError as error:
            self._away(error)
            return
        self._away_since = None
        assert self.follower is not None
        if self.follower.staged(wait_s=WAIT_S) is None:
            return
        staged = self.follower.hold()
        if staged is None:
            self._sleep(0.01)  # the mirror is being written
        else:
            self._serve(self.follower, staged)

    def close(self) -> None:
        if self.follower is not None:
            self.follower.close()
            self.follower = None

    def _attach(self) -> None:
        self._swap.attach()
        self.close()
        self.follower = self._make_follower()
        self.follower.start()
        self._log.info("server attached", url=self._options.url)

    def _serve(self, follower: WeightFollower, staged: Staged) -> None:
        every = self._options.verify_every
        verify = staged.digest if every and (self.swaps + 1) % every == 0 else None
        try:
            pause_s = self._swap.swap(follower.mirror, staged.policy, staged.changed, verify=verify)
        except AnabranchError as error:
            follower.reject(staged, str(error))
            self._failed(staged, error)
            return
        except BaseException:
            follower.reject(staged, "the process ends")
            raise
        follower.confirm(staged)
        self.swaps, self._torn, self.error = self.swaps + 1, 0, ""
        self.served_since_ms, self.pause_ms = self._clock_ms(), pause_s * 1e3
        self.publish_to_serve_ms = float(max(0, self.served_since_ms - staged.published_ms))
        if verify is not None:
            self.verified = str(staged.policy), staged.digest
        self._log.info("serving", policy=str(staged.policy), pause_ms=round(self.pause_ms, 1), path=staged.path)

    def _failed(self, staged: Staged, error: AnabranchError) -> None:
        if self._swap.state is not SwapState.TORN:
            self.error = f"swap to {staged.policy} refused: {error}"
            self._log.error(
                "swap refused; the old version goes on serving", policy=str(staged.policy), error=str(error)
            )
            if isinstance(error, ConfigError):
                raise error
            return
        self._torn += 1
        self.error = f"swap to {staged.policy} failed while writing, the server is paused: {error}"
        self._log.error("swap failed while writing; the server is paused", policy=str(staged.policy), error=str(error))
        if self._torn >= TORN_TRIES:
            raise TemporaryError(
                f"{self._options.url} stays paused after {TORN_TRIES} swaps that failed: {error}"
            ) from error
        self._sleep(RETRY_S)

    def _away(self, error: AnabranchError) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since, self.error = now, str(error)
            self._log.warning("server does not answer", error=str(error))
        if now - self._away_since > self._options.server_deadline_s:
            raise DeadlineError.waiting_for(
                f"the vLLM server at {self._options.url}", self._options.server_deadline_s, str(error)
            ) from error
        self._sleep(RETRY_S)


def follow(config: RunConfig, region: str, options: FollowOptions) -> int:
    """Keep one server up to date until a signal comes; returns the exit code."""
    if region not in config.regions:
        raise UsageError(f"--region {region}: the configuration has {', '.join(sorted(config.regions))}")
    name = f"{region}-server-{os.getpid()}-{secrets.token_hex(3)}"
    setup_logging("follow", region=region)
    log = structlog.get_logger()
    stop = StopSignal().install()

    def main() -> int:
        layout = layout_of_checkpoint(config.model.path)
        server = VllmServer(options.url)
        hub, weights = connect_hub(config), connect_weights(config, region)
        mirror = open_node_mirror(
            layout,
            run=config.run.name,
            node_dir=config.producer.node_dir,
            codec_threads=config.channel.codec_threads,
        )
        leases_hub = connect_hub(config)
        leases = LeaseKeeper(leases_hub.channel, name, lease_ms=config.channel.lease_ms)
        leases.start()

        def make_follower() -> WeightFollower:
            return WeightFollower(
                weights,
                mirror,
                run=config.run.name,
                poll_ms=config.producer.poll_ms,
                fetch_threads=config.channel.fetch_threads,
                verify=Verifier(config.channel.trusted_keys).check,
                leases=leases,
            )

        swap = ServerSwap(server, config.model.path.resolve(), layout, kv_policy=options.kv_policy)
        loop = ServerLoop(swap, make_follower, options, sleep=stop.wait)
        ready, next_status_s = False, 0.0
        try:
            while not stop.is_set():
                loop.turn()
                if not ready and swap.policy is not None:
                    ready = sd_notify("READY=1", f"STATUS=serving {swap.policy}") or True
                if time.monotonic() >= next_status_s:
                    next_status_s = time.monotonic() + STATUS_EVERY_S
                    sd_notify("WATCHDOG=1")
                    with contextlib.suppress(StreamUnavailableError):  # the follower says so, in its own time
                        hub.runs.report_producer(name, status(loop, swap, region))
        finally:
            loop.close()
            leases.close()
            mirror.close()
            swap.close()
            server.close()
            for connection in (hub, weights, leases_hub):
                connection.close()
        log.info("follower of the server ends", served=str(swap.policy))
        return 0

    return run_service(main)


def status(loop: ServerLoop, swap: ServerSwap, region: str) -> ProducerStatus:
    """The line of `anabranch weights followers`."""
    follower = loop.follower
    serving = follower.serving if follower else None
    return ProducerStatus(
        updated_ms=time.time_ns() // 1_000_000,
        region=region,
        pid=os.getpid(),
        state=f"vLLM server {swap.state.value}",
        policy=str(swap.policy) if swap.policy else "",
        served_since_ms=loop.served_since_ms,
        swaps=loop.swaps,
        last_swap_pause_ms=loop.pause_ms,
        publish_to_serve_ms=loop.publish_to_serve_ms,
        fetched_bytes=follower.fetched_bytes if follower else 0,
        last_fetched_bytes=serving.fetched_bytes if serving else 0,
        last_path=", ".join(serving.path) if serving else "",
        following=follower.state.value if follower else "",
        own_weights=follower.mirror.alone if follower else "",
        verified_policy=loop.verified[0],
        verified_digest=loop.verified[1],
        last_error=loop.error or (follower.last_error if follower else ""),
    )
