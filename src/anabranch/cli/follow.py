"""`anabranch follow`: a stock vLLM server serves a run's newest weights."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "follow",
        help="keep a stock vLLM server's weights up to date",
        description="Follow the weight channel of a run and swap each new version into a vLLM server on this machine, through\n"
        "its HTTP endpoints, while it serves. The server runs as the same user, with anabranch installed beside\n"
        "vLLM, from the checkpoint model.path, with VLLM_SERVER_DEV_MODE=1 and\n"
        """--weight-transfer-config '{"backend": "anabranch"}' (docs/vllm-plugin.md).""",
        epilog="examples:\n  anabranch follow --config run.toml --region east --server http://127.0.0.1:8000\n"
        "  anabranch follow --config run.toml --region east --server http://127.0.0.1:8000 --verify-every 10\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--region", required=True, metavar="NAME", help="a key of [regions]: where weights are read")
    parser.add_argument("--server", required=True, metavar="URL", help="of the vLLM server, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--kv-policy", default="recompute", choices=["recompute", "new_requests_only", "keep"],
        help="running requests at a swap: compute their KV anew, let them end first, or keep it (only for a server that "
        "caches no prefixes); default recompute",
    )  # fmt: skip
    parser.add_argument(
        "--verify-every", type=_count, default=0, metavar="N",
        help="compare the digest of the live weights at every Nth update; default 0: never",
    )  # fmt: skip
    parser.add_argument(
        "--server-deadline-s", type=float, default=600.0, metavar="S",
        help="how long a server that does not answer is waited for before exit 75 (default 600)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("0 or more")
    return number


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.producers.serve_follower import FollowOptions, follow

    options = FollowOptions(
        args.server,
        kv_policy=args.kv_policy,
        verify_every=args.verify_every,
        server_deadline_s=args.server_deadline_s,
    )
    return follow(config, args.region, options)
