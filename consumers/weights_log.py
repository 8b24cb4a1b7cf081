"""What is on the weight channel and who serves it, as text."""

from __future__ import annotations

import time

from anabranch.schemas.config import RunConfig
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.wiring import connect_hub


def render_weights(config: RunConfig, *, last: int) -> str:
    """The manifests of the head and up to `last` versions before it, and a line per producer.

    Raises StreamUnavailableError if the hub cannot be reached.
    """
    hub = connect_hub(config)
    try:
        head = hub.channel.head()
        if head is None:
            return f"nothing is published yet for run {config.run.name}"
        manifests = recent_manifests(hub.channel, head, last)
        return "\n".join([*_manifest_lines(manifests), "", *_producer_lines(hub.runs.producers(), head)])
    finally:
        hub.close()


def recent_manifests(channel: WeightChannel, head: PolicyVersion, last: int) -> list[Manifest]:
    """Manifests of `head` and the `last` versions before it that are still on the channel, oldest first."""
    found = []
    for version in range(max(0, head.version - last), head.version + 1):
        for kind in ("delta", "anchor"):
            manifest = channel.manifest(PolicyVersion(head.epoch, version), kind)
            if manifest is not None:
                found.append(manifest)
    return found


def _manifest_lines(manifests: list[Manifest]) -> list[str]:
    lines = [f"{'version':<10} {'kind':<7} {'bytes':>12} {'of dense':>9} {'changed':>8}  {'digest':<12} age"]
    now_ms = time.time_ns() // 1_000_000
    for m in manifests:
        lines.append(
            f"{m.policy!s:<10} {m.kind:<7} {m.payload_bytes:>12,} {m.payload_bytes / max(1, m.full_bytes):>9.1%} "
            f"{m.changed_elements / max(1, m.total_elements):>8.2%}  {m.result_digest[:12]} "
            f"{(now_ms - m.published_ms) / 1000:.0f} s"
        )
    return lines


def _producer_lines(producers: dict[str, ProducerStatus], head: PolicyVersion) -> list[str]:
    if not producers:
        return ["no producer reports"]
    lines = [f"{'producer':<28} {'serves':<10} {'pause':>9} {'publish-serve':>14}  state"]
    for name, status in sorted(producers.items()):
        behind = "" if status.policy == str(head) else " (behind)"
        error = f"; {status.last_error}" if status.last_error else ""
        lines.append(
            f"{name:<28} {status.policy or '-':<10} {status.last_swap_pause_ms:>6.1f} ms "
            f"{status.publish_to_serve_ms:>11.0f} ms  {status.state}{behind}{error}"
        )
    return lines
