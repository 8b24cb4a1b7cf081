"""`anabranch bench link`: from publishing to a verified mirror in a region, over a slow link made on this machine.

Invariant: a row is the median of updates that each ended with a checked digest; its target, bytes / bandwidth + 6 round
trips beside own encoding and decoding, is of the same bytes. Held by tests/process/test_bench_link.py.

The way through a replica is compared with reading the hub directly, over what congestion control the kernel offers and
with and without net.ipv4.tcp_slow_start_after_idle. Updates are `pause_s` apart, long enough for a connection to fall back
to its first window where the kernel does that.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from anabranch.deploy.codec_sweep import synthetic_step
from anabranch.deploy.link_redis import REPLICA_OF_HUB, LinkRedis, start_redis, wait_for_replica
from anabranch.deploy.link_run import RUN, Learner, Model, Region, Timed, sites, time_updates
from anabranch.deploy.slow_link import SlowLink
from anabranch.kernels.workers import Workers
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.keys import Keys
from anabranch.transport.redis_weight_channel import RedisWeightChannel

Route = Literal["replica", "hub"]
ROUTES: tuple[Route, ...] = ("replica", "hub")
# name -> elements, share that changes: the tiny preset's, and SmolLM2-135M's at learning rates of 1e-6 and 1e-5
MODELS = {"tiny": (1_050_496, 0.7), "135m-lr1e-6": (134_515_008, 0.0038), "135m-lr1e-5": (134_515_008, 0.0264)}
ROUND_TRIPS = 6
POLL_MS = 50
PAUSE_S = 4.0
THREADS = 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """TCP of both sides: congestion control, and whether a connection that was idle starts slowly again."""

    congestion: str
    slow_start_after_idle: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds are medians over the updates, `link_ms_max` the worst. `link_ms` = publish to offer less encoding and
    decoding, to be at most `target_ms`."""

    model: str
    route: Route
    congestion: str
    slow_start_after_idle: bool
    payload_bytes: int
    chunks: int
    updates: int
    publish_to_offer_ms: float
    encode_ms: float
    decode_ms: float
    link_ms: float
    link_ms_max: float
    target_ms: float

    @property
    def kept(self) -> bool:
        return self.link_ms <= self.target_ms


def congestion_controls() -> list[str]:
    """What this kernel has of cubic and bbr; cubic is what most machines run."""
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return [name for name in ("cubic", "bbr") if name in there] or there[:1]


def bench_link(
    program: Path,
    *,
    models: Sequence[str] = tuple(MODELS),
    routes: Sequence[Route] = ROUTES,
    rtt_ms: float = 150.0,
    rate_mbit: float = 100.0,
    updates: int = 5,
    pause_s: float = PAUSE_S,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Rows as they are measured. Raises ConfigError where this machine can make no link."""
    tunings = [Tuning(name, restart) for name in congestion_controls() for restart in (True, False)]
    with Workers(THREADS) as workers:
        for name in models:
            tell(f"{name}: making the weights")
            elements, density = MODELS[name]
            layout, old, new = synthetic_step("bf16", elements, density)
            model = Model.of(name, layout, (old, new), workers)
            for tuning in tunings:
                for route in routes:
                    tell(f"{name}, {route}, {tuning.congestion}, restart slow: {tuning.slow_start_after_idle}")
                    # A link of its own each time: no connection, and no metric that the kernel keeps, from before.
                    with SlowLink(program, rtt_ms=rtt_ms, rate_mbit=rate_mbit, seconds=1800) as link:
                        tune(link, tuning)
                        timed = list(_measure(link, model, route, updates, pause_s, workers))
                        yield _row(model, route, tuning, timed, link)


def tune(link: SlowLink, tuning: Tuning) -> None:
    link.set_kernel("net.ipv4.tcp_slow_start_after_idle", "1" if tuning.slow_start_after_idle else "0")
    link.set_congestion_control(tuning.congestion)


def _measure(
    link: SlowLink, model: Model, route: Route, updates: int, pause_s: float, workers: Workers
) -> Iterator[Timed]:
    with tempfile.TemporaryDirectory() as folder:
        hub = start_redis(link, "a", "hub", Path(folder, "hub"))
        near = hub
        if route == "replica":
            near = start_redis(link, "b", "replica", Path(folder, "replica"), REPLICA_OF_HUB)
            with link.inside("b"):
                client = near.client()
                wait_for_replica(client)
                client.close()
        with link.inside("a"):
            learner = Learner(_channel(hub, "a"), model, workers)
        with link.inside("b"):
            region = Region(
                _channel(near, "b"),
                _channel(hub, "b"),
                model,
                learner.first,
                poll_ms=POLL_MS,
                threads=THREADS,
                fetch_threads=ChannelSection().fetch_threads,
            )
        with sites(link, learner, region), link.inside("a"):
            yield from time_updates(learner, region, updates=updates, pause_s=pause_s)


def _channel(server: LinkRedis, side: Literal["a", "b"]) -> RedisWeightChannel:
    return RedisWeightChannel(server.client(side), Keys(RUN), what=f"the {server.role}'s Redis")


def _row(model: Model, route: Route, tuning: Tuning, timed: Sequence[Timed], link: SlowLink) -> Row:
    payload = int(statistics.median(t.payload_bytes for t in timed))

    def median_ms(seconds: Iterator[float]) -> float:
        return round(statistics.median(seconds) * 1e3, 1)

    return Row(
        model.name, route, tuning.congestion, tuning.slow_start_after_idle, payload, timed[0].chunks, len(timed),
        publish_to_offer_ms=median_ms(t.total_s for t in timed), encode_ms=median_ms(t.encode_s for t in timed),
        decode_ms=median_ms(t.decode_s for t in timed), link_ms=median_ms(t.link_s for t in timed),
        link_ms_max=round(max(t.link_s for t in timed) * 1e3, 1),
        target_ms=round((payload / link.rate_bytes_s + ROUND_TRIPS * link.rtt_s) * 1e3, 1),
    )  # fmt: skip


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"kept": row.kept}


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("model", "read from", "TCP", "restarts\nslowly"):
        drawn.add_column(name, no_wrap=True)
    for name in ("bytes", "publish →\noffer ms", "encode\nms", "decode\nms", "link\nms", "worst", "target\nms"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row.model, row.route, row.congestion, "yes" if row.slow_start_after_idle else "no",
            f"{row.payload_bytes:,}", f"{row.publish_to_offer_ms:,.0f}", f"{row.encode_ms:,.0f}",
            f"{row.decode_ms:,.0f}", f"{row.link_ms:,.0f}", f"{row.link_ms_max:,.0f}", f"{row.target_ms:,.0f}",
            style=None if row.kept else "red",
        )  # fmt: skip
    return drawn
