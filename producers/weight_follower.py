"""Follows the weight channel in the background and stages updates for the engine.

Invariant: what `staged()` offers is a mirror whose digest was checked against the manifest; while it is offered the
mirror does not change; the version served is only what `confirm` was told. A failed fetch, a broken chunk or a wrong
digest leaves the engine on its old version, is visible in `last_error`, and is retried (by way of the anchor once
the mirror's content is in doubt). Held by tests/unit/producers/test_weight_follower.py.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from anabranch.kernels.delta_codec import TensorChange, decode, decode_anchor
from anabranch.kernels.workers import Workers
from anabranch.producers.mirror import Mirror
from anabranch.producers.weight_plan import plan_path
from anabranch.schemas.errors import AnabranchError, ConfigError, DeltaError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel

RETRY_FIRST_S = 0.2
RETRY_LAST_S = 5.0

Changed = dict[str, NDArray[np.int64] | None]  # tensor -> flat indices, or None for all of it


class FollowerState(enum.Enum):
    POLLING = "polling"
    FETCHING = "fetching"
    STAGED = "staged"
    FAILED = "failed"  # for good: the producer must exit


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified update: `mirror` holds `policy`; `changed` is what differs from the version last confirmed."""

    policy: PolicyVersion
    digest: str
    changed: Changed
    fetched_bytes: int
    path: tuple[str, ...]
    published_ms: int


class WeightFollower:
    """Runs `poll_once` on a thread of its own. The engine's thread calls `staged`, then `confirm` or `reject`."""

    def __init__(
        self, channel: WeightChannel, mirror: Mirror, *, run: str, poll_ms: int, codec_threads: int = 1
    ) -> None:
        self._channel, self.mirror, self._run = channel, mirror, run
        self._state_bits = {name: mirror.tensor_bits(name) for name in mirror.layout.by_name}
        self._workers = Workers(codec_threads)
        self._poll_s = poll_ms / 1000
        self._state = FollowerState.POLLING
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._offer: Staged | None = None
        self._in_mirror: tuple[PolicyVersion, str] | None = None
        self._confirmed: PolicyVersion | None = None
        self._unconfirmed: Changed = {}
        self._fatal: Exception | None = None
        self.last_error = ""
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run_thread, name="weight-follower", daemon=True)

    @property
    def state(self) -> FollowerState:
        return self._state

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._workers.close()

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        """The update that waits to be swapped in, if any. Raises what following has failed of for good: a
        ConfigError, or a mistake of our own."""
        if wait_s:
            self._ready.wait(wait_s)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            return self._offer

    def confirm(self, staged: Staged) -> None:
        """The engine serves `staged.policy`: go on following."""
        with self._lock:
            assert self._offer is staged, "confirm of an update that is not on offer"
            self._confirmed, self._unconfirmed = staged.policy, {}
            self._clear_offer()

    def reject(self, staged: Staged, reason: str) -> None:
        """The engine refused `staged` and still serves its old version; its changes are offered again with the next."""
        with self._lock:
            assert self._offer is staged, "reject of an update that is not on offer"
            self.last_error = reason
            self._unconfirmed = staged.changed
            self._clear_offer()

    def poll_once(self) -> bool:
        """Look at the head; fetch, verify and stage what is new. True if something was staged."""
        head = self._channel.head()
        if head is None or head == self._confirmed:
            return False
        self._state = FollowerState.FETCHING
        if self._in_mirror is not None and self._in_mirror[0] == head:  # rejected before: offer it once more
            path: list[Manifest] = []
        else:
            path = plan_path(
                self._channel,
                run=self._run,
                layout_hash=self.mirror.layout.hash,
                have=self._in_mirror,
                head=head,
            )
        fetched = [[self._channel.blob(c.digest) for c in m.chunks] for m in path]  # all, before the mirror is touched
        for manifest, chunks in zip(path, fetched, strict=True):
            self._advance(manifest, chunks)
        assert self._in_mirror is not None
        with self._lock:
            self._offer = Staged(
                policy=self._in_mirror[0],
                digest=self._in_mirror[1],
                changed=self._unconfirmed,
                fetched_bytes=sum(m.payload_bytes for m in path),
                path=tuple(f"{m.kind} {m.policy}" for m in path),
                published_ms=path[-1].published_ms if path else 0,
            )
            self._state = FollowerState.STAGED
            self.last_error = ""
            self._ready.set()
        return True

    def _advance(self, manifest: Manifest, chunks: list[bytes]) -> None:
        """Take the mirror to `manifest`, whose base it holds. A bad chunk of a delta is refused before a byte is written;
        a snapshot is decoded straight into the mirror, since a second copy of the model would not fit beside it."""
        layout, changed = self.mirror.layout, dict(self._unconfirmed)
        delta = manifest.kind == "delta"
        update = decode(layout, chunks, self._state_bits, self._workers) if delta else []
        # Until the digest proves what is in the mirror, anything may be.
        self._in_mirror, self._unconfirmed = None, dict.fromkeys(layout.by_name)
        if delta:
            self.mirror.apply(update)
        else:
            changed = dict.fromkeys(layout.by_name)
            self.mirror.touch(*layout.by_name)
            decode_anchor(layout, chunks, self._state_bits, self._workers)
        digest = self.mirror.digest()
        if digest != manifest.result_digest:
            raise DeltaError(f"weights {manifest.policy}: digest {digest}, manifest says {manifest.result_digest}")
        _merge(changed, update)
        self._in_mirror, self._unconfirmed = (manifest.policy, digest), changed

    def _clear_offer(self) -> None:
        self._offer = None
        self._state = FollowerState.POLLING
        self._ready.clear()
        self._wake.set()

    def _run_thread(self) -> None:
        pause_s = RETRY_FIRST_S
        while not self._stop.is_set():
            wait_s = self._poll_s
            try:
                if self._state is not FollowerState.STAGED:
                    self.poll_once()
                pause_s = RETRY_FIRST_S
            except ConfigError as error:
                self._fail(error)
                return
            except AnabranchError as error:
                self._state = FollowerState.POLLING
                if str(error) != self.last_error:
                    self._log.warning("weights not fetched; the old version goes on serving", error=str(error))
                self.last_error = str(error)
                wait_s, pause_s = pause_s, min(2 * pause_s, RETRY_LAST_S)
            except Exception as error:  # noqa: BLE001 - raised on the engine's thread, which must not serve one version for ever
                self._fail(error)
                return
            self._wake.wait(wait_s)
            self._wake.clear()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._fatal, self._state = error, FollowerState.FAILED
            self.last_error = repr(error)
            self._ready.set()


def _merge(changed: Changed, update: list[TensorChange]) -> None:
    """Add the places of `update` to `changed`: once per tensor, however many chunks it lies in."""
    by_name: dict[str, list[NDArray[np.int64] | None]] = {}
    for change in update:
        by_name.setdefault(change.name, []).append(change.indices)
    for name, pieces in by_name.items():
        before = changed.get(name, np.empty(0, np.int64))
        sparse = sorted(
            (indices for indices in pieces if indices is not None and indices.size), key=lambda i: int(i[0])
        )
        if before is None or any(indices is None for indices in pieces):
            changed[name] = None
        else:
            together = np.concatenate(sparse)  # ascending: pieces of one update do not overlap
            changed[name] = np.union1d(before, together) if before.size else together


def changed_elements(changed: Mapping[str, NDArray[np.int64] | None], mirror: Mirror) -> int:
    """How many elements a swap of `changed` writes."""
    return sum(mirror.layout.by_name[n].numel if i is None else int(i.size) for n, i in changed.items())
