"""`anabranch view`: a recorded run in the browser. What is heavy is loaded when it runs."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, at_least, config_from

DEFAULT_PORT = 8765


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "view",
        help="look at a run in the browser: overview, trajectories, steps, weights",
        description="Serve pages over a run's records, on this machine alone unless --host says otherwise. It only reads: a run that goes on\n"
        "may be looked at. An address other than loopback gets a token, which stands in the address that is printed. Ctrl-C ends it.",
        epilog="examples:\n  anabranch view runs/demo\n  anabranch view runs/demo --port 0 --open\n  anabranch view s3://bucket/runs/demo\n"
        "  anabranch view --config run.toml --streams\n  anabranch view runs/demo --host 0.0.0.0\n",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "viewed_run",
        nargs="?",
        metavar="RUN|URL",
        help="run directory (runs/NAME), or URL of an object store; default: that of --config",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="listen there (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=at_least(0), default=DEFAULT_PORT, metavar="N", help=f"0: a free one (default {DEFAULT_PORT})"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser of this machine")
    parser.add_argument(
        "--streams", action="store_true", help="also what is in the streams of --config and not recorded yet"
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from anabranch.consumers.token_values import token_pieces
    from anabranch.consumers.viewer.app import Viewed
    from anabranch.consumers.viewer.serve import serve
    from anabranch.deploy.replay_source import open_source
    from anabranch.schemas.errors import UsageError
    from anabranch.transport.log import setup_logging

    if args.port > 65535:
        raise UsageError("--port: at most 65535")
    setup_logging("view")
    asked = args.config is not None or args.overrides or args.viewed_run is None
    if args.streams and not asked:
        raise UsageError("--streams needs --config: that says where they are")
    config = config_from(args) if asked else None

    def ready(address: str) -> None:
        print(f"viewer: {address}", flush=True)
        if args.open and not webbrowser.open(address):
            print("anabranch view: no browser was found; open the address yourself", file=sys.stderr)

    with open_source(args.viewed_run, config, streams=args.streams) as source:
        model = source.setting("model", "path")
        name = str(source.setting("run", "name") or (source.directory.name if source.directory else "streams"))
        age = source.setting("correction", "max_age")
        viewed = Viewed(
            name, source.reader, token_pieces(None if model is None else Path(model)), None if age is None else int(age)
        )
        serve(viewed, host=args.host, port=args.port, ready=ready)
    return 0
