"""What the processes of a chaos run are: servers, learner, recorder and producers, as specifications for the supervisor.

Invariant: the programs and the watchdog are those of production; what is different is where they stand (`ip netns exec`),
their clock (deploy/chaos/stepped_clock.py, libfaketime), and time-outs short enough for many faults in an hour. Servers are
fsynced once a second, as in production, and so forget acknowledged writes when they are killed.
Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from anabranch.deploy import topology
from anabranch.deploy.chaos.sites import HUB, PORT, Sites
from anabranch.deploy.chaos.stepped_clock import write_offset
from anabranch.deploy.child import ChildSpec, Restart, RestartLimits
from anabranch.schemas.config import ENV_PREFIX, RunConfig, dump_toml, load_config
from anabranch.transport.embedded_valkey import EmbeddedValkey

RUN = "chaos"
WATCHDOG_S = 20.0
LIMITS = RestartLimits(budget=10**6, window_s=4.0, backoff_s=0.3, backoff_cap_s=1.0)
DISK_BYTES = {"run": 512 * 2**20, "spool": 64 * 2**20, "redis": 256 * 2**20}
_FAKETIME = ("/usr/lib/{machine}/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")

# Over the tiny preset. Small groups and batches leave the two cores of a small machine to the programs that restart.
OVERRIDES = (
    "sampling.group_size=4", "sampling.min_group_size=2",
    "producer.groups_in_flight=8", "producer.max_num_seqs=32", "producer.kv_cache_bytes=33554432", "producer.poll_ms=50",
    "producer.permit_lease_ms=6000", "producer.rollout_deadline_s=10.0", "producer.group_deadline_s=20.0",
    "learner.steps=1000000", "learner.groups_per_step=8", "learner.checkpoint_every=5", "learner.evaluate=false",
    "learner.lr=1e-6", "learner.batch_deadline_s=180.0", "correction.max_age=3", "task.heldout_size=16",
    "channel.retain_bytes=33554432", "channel.lease_ms=20000", "channel.skip_levels=3", "channel.codec_threads=1",
    "channel.fetch_threads=8", "channel.connect_deadline_s=90.0",
    "stream.claim_idle_ms=4000", "stream.socket_timeout_ms=2000", "stream.max_entry_bytes=262144",
    "spool.max_bytes=4194304", "spool.segment_bytes=262144", "spool.release_after_ms=3000", "spool.full_deadline_s=180.0",
    "ledger.check_every_s=2.0", "recorder.seconds_per_file=10.0",
)  # fmt: skip


class Place:
    """Files and addresses of one run under `directory`. Secrets are made here and stand in environments and 0600 files.
    `overrides`: of the scenario, over `OVERRIDES`."""

    def __init__(
        self, directory: Path, sites: Sites, *, temporary: Path, model: Path, seed: int, overrides: Sequence[str] = ()
    ) -> None:
        self.directory, self.sites, self.temporary = directory, sites, temporary
        self.disks = directory / "disks"
        self.passwords = {name: secrets.token_urlsafe(18) for name in sites.names}
        self.faketime = faketime_library()
        self.config = _config(directory, sites, model, seed, overrides)
        self.clocks = {name: temporary / f"{name}.clock" for name in (*self.servers, *self.clients)}
        self.config_file = directory / "config.toml"

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(map(server_name, self.sites.names))

    @property
    def clients(self) -> tuple[str, ...]:
        return ("learner", "recorder", *(f"producer-{region}" for region in self.sites.regions))

    @property
    def run_directory(self) -> Path:
        return self.config.run.directory

    def spool(self, region: str) -> Path:
        """Where spools are on that disk."""
        return self.disks / f"spool-{region}" / RUN

    def disk_names(self) -> list[str]:
        of_regions = [f"{kind}-{region}" for kind in ("spool", "redis") for region in self.sites.regions]
        return ["run", *of_regions]

    def make(self) -> None:
        """Disks, clocks and the configuration file."""
        for name in self.disk_names():
            self.sites.disk(self.disks / name, DISK_BYTES[name.partition("-")[0]])
        for name in self.servers:
            set_server_clock(self.clocks[name], 0)
        for name in self.clients:
            write_offset(self.clocks[name], 0)
        self.config_file.write_text(dump_toml(self.config), encoding="utf-8")

    def url(self, site: str) -> str:
        """Of the server of `site`, for this process: through a socket file, whatever the links do."""
        return f"unix://:{self.passwords[site]}@{self._socket(site)}?db=0"

    def site_of(self, child: str) -> str:
        """Where a child runs."""
        region = child.rpartition("-")[2]
        return region if region in self.sites.regions else HUB

    def server_data(self, site: str) -> Path:
        return self.temporary / "hub" if site == HUB else self.disks / f"redis-{site}"

    def server_spec(self, site: str) -> ChildSpec:
        name = server_name(site)
        server = EmbeddedValkey(self.server_data(site), port=PORT, password=self.passwords[site], fsync="everysec")
        argv = [*server.command(), "--logfile", "", "--bind", " ".join(["127.0.0.1", *self.sites.addresses(site)])]
        argv += ["--unixsocket", str(self._socket(site)), "--unixsocketperm", "700"]
        if self.faketime is not None:
            faked = {
                "LD_PRELOAD": self.faketime, "FAKETIME_TIMESTAMP_FILE": self.clocks[name], "FAKETIME_CACHE_DURATION": 1,
                "FAKETIME_DONT_FAKE_MONOTONIC": 1, "DONT_FAKE_MONOTONIC": 1, "NO_FAKE_STAT": 1,
            }  # fmt: skip
            argv = ["/usr/bin/env", *(f"{key}={value}" for key, value in faked.items()), *argv]
        return ChildSpec(name, self.sites.command(site, argv), restart=Restart.ALWAYS, stop_order=topology.SERVERS)

    def client_spec(self, name: str) -> ChildSpec:
        site = self.site_of(name)
        words = {"learner": ["learn"], "recorder": ["record"]}.get(name, ["produce", "--region", site])
        words[1:1] = ["--config", str(self.config_file)]
        program = [sys.executable, "-I", "-u", "-m", "anabranch.deploy.chaos.stepped_clock", str(self.clocks[name])]
        return ChildSpec(
            name,
            self.sites.command(site, [*program, *words]),
            env=self._environment(site),
            restart=Restart.ALWAYS,
            stop_order=topology.CLIENTS,
            watchdog_s=WATCHDOG_S,
            stop_within_s=30.0,
        )

    def _environment(self, site: str) -> dict[str, str]:
        hub = "127.0.0.1" if site == HUB else self.sites.hub_address(site)
        variables = {"HUB__URL": self._tcp(HUB, hub)}
        for region in self.sites.regions:
            variables[f"REGIONS__{region.upper()}__URL"] = self._tcp(region, self.sites.address(region))
        if site != HUB:
            variables["SPOOL__DIR"] = str(self.spool(site).parent)
            variables["PRODUCER__NODE_DIR"] = str(self.temporary / f"node-{site}")
        return {f"{ENV_PREFIX}{name}": value for name, value in variables.items()}

    def _tcp(self, site: str, address: str) -> str:
        return f"redis://:{self.passwords[site]}@{address}:{PORT}/0"

    def _socket(self, site: str) -> Path:
        return self.temporary / f"{site}.sock"


def server_name(site: str) -> str:
    return f"redis-{site}"


def set_server_clock(file: Path, seconds: float) -> None:
    """As libfaketime reads it. In place: a reader finds the old line or the new one, both of one length."""
    with file.open("r+b" if file.exists() else "wb") as out:
        out.write(f"{seconds:+012.1f}\n".encode())


def faketime_library() -> Path | None:
    import platform

    for pattern in _FAKETIME:
        path = Path(pattern.format(machine=f"{platform.machine()}-linux-gnu"))
        if path.exists():
            return path
    return None


def _config(directory: Path, sites: Sites, model: Path, seed: int, overrides: Sequence[str]) -> RunConfig:
    import json

    preset = (Path(topology.__file__).resolve().parent / "presets" / "tiny.toml").read_text(encoding="utf-8")
    preset = "\n".join(line for line in preset.splitlines() if not line.startswith(("target_reward", "[regions.")))
    more = [f"regions.{region}.url=redis://127.0.0.1:{PORT}/0" for region in sites.regions]
    more += [f"run.name={RUN}", f"run.seed={seed}", f"model.path={json.dumps(str(model))}"]
    more += [f"run.dir={json.dumps(str(directory / 'disks' / 'run'))}"]
    return load_config(beneath=preset, overrides=[*OVERRIDES, *overrides, *more])
