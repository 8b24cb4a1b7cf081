"""What `anabranch weights` does, one function a kind: from parsed arguments and a connected hub to output.

Loaded only when a command runs; the parsers in `weights.py` stay light.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.deploy import (
    weights_followers,
    weights_gc,
    weights_log,
    weights_path,
    weights_show,
)
from anabranch.deploy.weights_keys import signature_check, signature_words
from anabranch.deploy.weights_pins import pin, unpin
from anabranch.deploy.weights_versions import NOTHING, head_or_fault
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import ManifestError, TemporaryError
from anabranch.transport.signing import load_signer
from anabranch.transport.wiring import Hub, connect_hub

LOOK_DEADLINE_S = 10.0


@contextmanager
def hub_of(config: RunConfig) -> Iterator[Hub]:
    """A person waits: not for as long as a process of a run would."""
    deadline_s = min(config.channel.connect_deadline_s, LOOK_DEADLINE_S)
    channel = config.channel.model_copy(update={"connect_deadline_s": deadline_s})
    hub = connect_hub(config.model_copy(update={"channel": channel}))
    try:
        yield hub
    finally:
        hub.close()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _end_with(fault: str) -> None:
    """What else there is has been shown. Raises ManifestError if the head cannot be read."""
    if fault:
        raise ManifestError(fault)


def _log(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    def row(line: weights_log.Line) -> str:
        return weights_log.json_text(line) if args.json else weights_log.text_of(line, time.time_ns() // 1_000_000)

    lines = weights_log.read_log(hub.channel, last=args.last)
    _, fault = head_or_fault(hub.channel)
    if not lines and not fault and not args.follow:
        raise TemporaryError(NOTHING.format(run=config.run.name))
    if not args.json:
        print(f"head: not readable\n\n{weights_log.HEADING}" if fault else weights_log.HEADING)
    for line in lines:
        print(row(line))
    if args.follow:
        sys.stdout.flush()
        weights_log.follow(
            hub.channel,
            lambda line: print(row(line), flush=True),
            lambda what: print(f"anabranch weights: {what}", file=sys.stderr),
            after=lines[-1].version.policy if lines else None,
        )
    _end_with(fault)


def _show(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    shown = weights_show.read_version(hub.channel, config.run.name, args.version)
    trusted = config.channel.trusted_keys
    if args.json:
        _print_json(weights_show.as_json(shown, lambda manifest: signature_words(manifest, trusted)))
    else:
        print(weights_show.render(shown, lambda manifest: signature_words(manifest, trusted)))


def _path(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    paths = weights_path.find_paths(hub.channel, config.run.name, args.start, args.goal)
    if args.json:
        _print_json(weights_path.as_json(paths))
    else:
        print(weights_path.render(paths))


def _verify(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    from anabranch.deploy import weights_check  # with the codec, which the others need not wait for

    if args.producers:
        weights_check.check_producers(hub.channel, hub.runs, deadline_s=args.deadline)
    else:
        weights_check.check_channel(
            hub.channel, config, first=args.first, last=args.last, chunks_only=args.chunks_only, threads=args.threads
        )


def _followers(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    head, followers = weights_followers.read_followers(hub.channel, hub.runs)
    if args.json:
        _print_json(weights_followers.as_json(config.run.name, head, followers))
    else:
        print(weights_followers.render(config.run.name, head, followers))
    _end_with(head.fault)


def _pin(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    print(pin(hub.channel, config.run.name, args.version, args.note))


def _unpin(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    print(unpin(hub.channel, config.run.name, args.version))


def _rollback(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    from anabranch.deploy import weights_rollback  # as above

    key = config.channel.signing_key_file
    signer = load_signer(key) if key else None
    plan = weights_rollback.plan_rollback(hub.channel, hub.runs, config.run.name, args.version)
    if not args.force:
        weights_rollback.refuse_while_learning(plan)
    weights_rollback.check_way(
        hub.channel,
        plan,
        check_signature=signature_check(config.channel.trusted_keys),
        threads=config.channel.fetch_threads,
    )
    print(weights_rollback.describe(plan))
    if not args.yes:
        if not sys.stdin.isatty():
            args.error("not asked on a terminal: give --yes to do it")
        print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was changed")
            return
    needed = bool(config.channel.trusted_keys)
    fork = weights_rollback.roll_back(hub.channel, config.run.name, plan, signer, signature_needed=needed)
    print(f"the head is {fork.policy}, {'signed by ' + fork.signature.key if fork.signature else 'not signed'}")


def _gc(args: argparse.Namespace, config: RunConfig, hub: Hub) -> None:
    budget = config.channel.retain_bytes if args.bytes is None else args.bytes
    print(weights_gc.render(weights_gc.collect(hub.channel, budget, dry_run=args.dry_run)))
    if args.orphans:
        orphans = weights_gc.find_orphans(hub.channel)
        deleted = None if args.dry_run else weights_gc.delete_orphans(hub.channel, orphans)
        print(weights_gc.render_orphans(orphans, deleted))


COMMANDS: dict[str, Callable[[argparse.Namespace, RunConfig, Hub], None]] = {
    "log": _log,
    "show": _show,
    "verify": _verify,
    "path": _path,
    "followers": _followers,
    "pin": _pin,
    "unpin": _unpin,
    "rollback": _rollback,
    "gc": _gc,
}
