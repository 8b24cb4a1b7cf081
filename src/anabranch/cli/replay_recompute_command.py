"""`anabranch replay recompute`: torch and transformers are loaded only when it runs.

Held by tests/unit/cli/test_replay_look.py and tests/unit/deploy/test_replay_recompute.py.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.weights_commands import hub_of
from anabranch.consumers.find_trajectory import find_trajectory
from anabranch.consumers.token_values import token_pieces
from anabranch.consumers.trajectory_page import read_group
from anabranch.deploy.replay_source import Source, open_source
from anabranch.deploy.replay_text import json_value
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import UsageError
from anabranch.transport.signing import Verifier

if TYPE_CHECKING:
    from anabranch.deploy.replay_recompute import Recomputed


def recompute(args: argparse.Namespace, config: RunConfig | None) -> int:
    from anabranch.deploy import replay_recompute

    if args.version is not None and config is None:
        raise UsageError("--version needs --config: that says where the weight channel is; or give --model DIR")
    with open_source(args.recorded_run, config, streams=args.streams) as source:
        one = find_trajectory(source.reader, args.id)
        (row,) = read_group(source.reader, one)
        replay_recompute.check_row(row)
        temperature = source.setting("sampling", "temperature")
        if temperature is None:
            raise UsageError("the run left no configuration that tells its sampling.temperature: give --config")
        if args.model is not None:
            found = _from_folder(args, source, row, float(temperature))
        else:
            assert config is not None
            found = _from_channel(args, config, row, float(temperature))
        pieces = token_pieces(args.model or Path(source.setting("model", "path") or ""))
    if args.json:
        print(json.dumps(json_value(replay_recompute.as_json(row, found))))
    else:
        print(replay_recompute.render(row, found, pieces=pieces, most=None if args.all_tokens else 64))
    return 0


def _from_folder(args: argparse.Namespace, source: Source, row: dict[str, Any], temperature: float) -> Recomputed:
    from anabranch.deploy import replay_recompute

    digest = replay_recompute.folder_digest(args.model, threads=os.cpu_count() or 1)
    named = replay_recompute.policies_of(source.reader, digest)
    logprobs = replay_recompute.compute(args.model, row, temperature=temperature, dtype=args.dtype)
    return replay_recompute.Recomputed(named[-1] if named else None, digest, str(args.model), logprobs)


def _from_channel(args: argparse.Namespace, config: RunConfig, row: dict[str, Any], temperature: float) -> Recomputed:
    from anabranch.deploy import replay_recompute

    with hub_of(config) as hub:
        policy, image = replay_recompute.image_of(
            hub.channel, config.run.name, args.version,
            check=Verifier(config.channel.trusted_keys).check, threads=config.channel.fetch_threads,
        )  # fmt: skip
    with replay_recompute.exported(image, config.model.path) as folder:
        logprobs = replay_recompute.compute(folder, row, temperature=temperature, dtype=args.dtype)
    return replay_recompute.Recomputed(policy, image.digest, "from the channel", logprobs)
