"""What `anabranch stream` does, one function a kind. Loaded only when a command runs.

Held by tests/unit/cli/test_stream.py, tests/process/test_delivery_commands.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from anabranch.cli.confirm import confirmed
from anabranch.deploy import producer_life, stream_state
from anabranch.deploy.plain_text import plain
from anabranch.deploy.regions_asked import Asked, ask_regions, impatient, regions_of
from anabranch.schemas.config import RunConfig
from anabranch.transport import wiring
from anabranch.transport.stream import TrajectoryStream

NO_SUCH_NAME = 1


def _connect(args: argparse.Namespace, config: RunConfig) -> Asked[TrajectoryStream]:
    patient = impatient(config)
    asked = ask_regions(regions_of(config, args.region), lambda region: wiring.connect_region(patient, region))
    if not asked.answers:
        asked.end()
    return asked


def _close(asked: Asked[TrajectoryStream]) -> None:
    for stream in asked.answers.values():
        stream.close()


def _ls(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    states = ask_regions(list(asked.answers), lambda region: asked.answers[region].state())
    print(stream_state.as_json(states.answers) if args.json else stream_state.render(states.answers))
    _close(asked)
    asked.end()
    states.end()
    return 0


def _forget_group(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    there = {
        region: lag
        for region, stream in asked.answers.items()
        if (lag := stream_state.lag_of(stream, args.name)) is not None
    }
    for region, lag in there.items():
        print(
            f"{region}: group {plain(lag.name, 60)} has not read {lag.undelivered:,} entries, {lag.pending:,} are pending"
        )
    if there and not confirmed(args):
        return 0
    for region in there:
        if asked.answers[region].forget_group(args.name):
            print(f"{region}: group {plain(args.name, 60)} is forgotten")
    return _end(args, asked, bool(there), "group")


def _forget_producer(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    progress = {region: stream.progress(args.name) for region, stream in asked.answers.items()}
    there = [region for region, known in progress.items() if known.next_seq is not None]
    if there and not args.force:
        producer_life.refuse_living(args.name, progress, producer_life.ask_hub(impatient(config), args.name))
    for region in there:
        print(f"{region}: producer {plain(args.name, 60)} is known here")
    if there and not confirmed(args):
        return 0
    for region in there:
        if stream_state.forget_producer(asked.answers[region], args.name):
            print(f"{region}: producer {plain(args.name, 60)} is forgotten")
    return _end(args, asked, bool(there), "producer")


def _end(args: argparse.Namespace, asked: Asked[TrajectoryStream], found: bool, what: str) -> int:
    _close(asked)
    asked.end()
    if found:
        return 0
    print(f"anabranch stream: no {what} {plain(args.name, 60)} in {', '.join(asked.answers)}", file=sys.stderr)
    return NO_SUCH_NAME


COMMANDS: dict[str, Callable[[argparse.Namespace, RunConfig], int]] = {
    "ls": _ls,
    "forget-group": _forget_group,
    "forget-producer": _forget_producer,
}
