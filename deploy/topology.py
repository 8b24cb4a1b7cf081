"""Which processes a demo consists of: servers, learner, producers, recorder, as specifications for the supervisor.

Invariant: the commands are those of production (`anabranch learn|produce|record --config FILE`); what differs from
one process to the next travels in its environment, passwords included, and never on a command line.
Held by tests/unit/deploy/test_topology.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from anabranch.deploy.child import ChildSpec, Restart
from anabranch.schemas.config import ENV_PREFIX, RunConfig
from anabranch.transport.embedded_valkey import EmbeddedValkey

CLIENTS, SERVERS = 0, 1  # stop order
WATCHDOG_S = 300.0  # a child that has reported itself and then says nothing for so long is restarted
PRODUCER_STOP_S = 10.0  # one that is loading its engine does not listen, and has nothing to lose
HUB = "hub"
# Of whoever watches us, and of a launcher of ranks: a child that found them would take itself for one of theirs.
_NOT_INHERITED = frozenset({
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ANABRANCH_RENDEZVOUS_FILE",
})  # fmt: skip
_QUIET_MACHINE = {
    "OMP_WAIT_POLICY": "passive",  # processes share the cores: a thread that waits must not spin
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def program(*words: str) -> tuple[str, ...]:
    """`anabranch WORDS` of this very installation, nothing from the working directory or PYTHON* variables."""
    return (sys.executable, "-I", "-u", "-m", "anabranch.cli.main", *words)


def common_environment(parent: Mapping[str, str], *, temporary: Path, cache: Path) -> dict[str, str]:
    """What every child gets. Settings of `parent` (ANABRANCH__…) are left out: they are in the resolved configuration,
    and must not win over a --set given to the demo."""
    kept = {k: v for k, v in parent.items() if not k.startswith(ENV_PREFIX) and k not in _NOT_INHERITED}
    return {
        **kept,
        **_QUIET_MACHINE,
        "OMP_NUM_THREADS": "1",
        "ANABRANCH_CACHE_DIR": str(cache),
        "TMPDIR": str(temporary),
    }


def server_specs(config: RunConfig, data: Path) -> tuple[list[ChildSpec], dict[str, str]]:
    """Embedded servers for the hub and each region, over `data`/NAME; and the variables that carry their URLs.

    The hub has a server of its own, as in production: the regions' streams must not share the fate of weights and
    permits, nor the other way round.
    """
    specs, urls = [], {}
    names = [HUB, *(f"redis-{region}" for region in config.regions)]
    for name, port in zip(names, _free_ports(len(names)), strict=True):
        server = EmbeddedValkey(data / name, port=port)
        argv = (*server.command(), "--logfile", "")
        specs.append(ChildSpec(name, argv, restart=Restart.ALWAYS, stop_order=SERVERS))
        urls[_url_variable(name)] = server.url
    for region, section in config.regions.items():
        if section.weights_url is not None:  # its replica is far away: on one machine the hub itself serves all
            urls[f"{_url_variable(f'redis-{region}').removesuffix('URL')}WEIGHTS_URL"] = urls[_url_variable(HUB)]
    return specs, urls


def client_specs(config: RunConfig, config_file: Path, *, producers: int, urls: Mapping[str, str]) -> list[ChildSpec]:
    """The learner, `producers` in each region, and the recorder."""
    common = ("--config", str(config_file))
    specs = [
        ChildSpec(
            "learner",
            program("learn", *common),
            env={**urls, "OMP_NUM_THREADS": str(config.learner.threads)},
            completes_run=True,
            stop_order=CLIENTS,
            watchdog_s=WATCHDOG_S,
        )
    ]
    for region in config.regions:
        for number in range(1, producers + 1):
            name = f"producer-{region}" if producers == 1 else f"producer-{region}-{number}"
            argv = program("produce", *common, "--region", region)
            specs.append(
                ChildSpec(
                    name,
                    argv,
                    env=urls,
                    ends_itself=True,
                    stop_order=CLIENTS,
                    watchdog_s=WATCHDOG_S,
                    stop_within_s=PRODUCER_STOP_S,
                )
            )
    specs.append(
        ChildSpec(
            "recorder",
            program("record", *common),
            env=urls,
            ends_itself=True,
            stop_order=CLIENTS,
            watchdog_s=WATCHDOG_S,
        )
    )
    return specs


def url_overrides(urls: Mapping[str, str]) -> list[str]:
    """`--set` form of the URL variables, for a configuration in this process."""
    return [f'{name[len(ENV_PREFIX) :].lower().replace("__", ".")}="{url}"' for name, url in urls.items()]


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where models and compiled things are kept between runs: $ANABRANCH_CACHE_DIR, else the user's cache."""
    if chosen := environ.get("ANABRANCH_CACHE_DIR"):
        return Path(chosen)
    return Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "anabranch"


def _free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that were free a moment ago."""
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in bound]


def _url_variable(server: str) -> str:
    return (
        f"{ENV_PREFIX}HUB__URL"
        if server == HUB
        else f"{ENV_PREFIX}REGIONS__{server.removeprefix('redis-').upper()}__URL"
    )
