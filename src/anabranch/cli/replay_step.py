"""`anabranch replay step`: torch and DeepSpeed are loaded only when it runs.

Held by tests/unit/cli/test_replay_step.py and tests/e2e/test_replay_step.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from anabranch.cli.common import add_config_arguments, config_from
from anabranch.cli.kinds import kind_parser


def add_step(kinds: Any) -> None:
    parser = kind_parser(
        kinds, "replay", "step", "run a recorded step again and compare it bit for bit",
        " 24 --run runs/demo\n 24 --epoch 2 --run runs/demo\n 24 --run runs/demo --from-checkpoint 20 --json\n --random 20 --run runs/demo\n",
        "The newest checkpoint before the step is loaded by the production engine, with as many ranks as then, and every step from there on runs\n"
        "on its recorded batch. Loss, gradient norm, every value of every rollout and token, and the digest of the weights are compared\n"
        "with what was logged. Exit 0: the same bits; 1: not, and what differs is located, the cause first.\n"
        "The run is only read.\n",
        run,
    )  # fmt: skip
    parser.add_argument(
        "step", type=int, nargs="?", metavar="STEP", help="number of the step; the newest epoch that did it"
    )
    parser.add_argument("--epoch", type=int, metavar="E", help="the one that epoch E did")
    parser.add_argument("--random", type=int, metavar="N", help="N recorded steps drawn at random, instead of STEP")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of --random (default 0)")
    parser.add_argument(
        "--from-checkpoint", type=int, metavar="C", help="begin with the checkpoint of step C, not with the newest"
    )
    parser.add_argument(
        "--run",
        metavar="DIR",
        type=Path,
        dest="recorded_run",
        help="run directory (runs/NAME); default: that of --config",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model's folder, where it is not where the run had it"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run it there, whatever the run used")
    parser.add_argument("--json", action="store_true", help="one JSON object a step")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.deploy.replay_source import open_source
    from anabranch.schemas.errors import UsageError

    if (args.step is None) == (args.random is None):
        raise UsageError("give the number of a step, or --random N")
    if args.random is not None and args.random < 1:
        raise UsageError("--random: at least 1")
    config = config_from(args) if args.recorded_run is None else None
    with open_source(None if args.recorded_run is None else str(args.recorded_run), config) as source:
        if source.directory is None:
            raise UsageError("a step needs the run's directory, with its checkpoints: give --run DIR")
        from anabranch.deploy import replay_step, replay_step_show

        opened = replay_step.open_run(
            source.directory, source.reader, source.settings, model=args.model, device=args.device,
            tell=lambda text: print(f"replay: {text}", file=sys.stderr, flush=True),
        )  # fmt: skip
        wanted = replay_step.chosen(source.directory, args.step, args.epoch, some=args.random, seed=args.seed)
        replays = replay_step.replay_steps(opened, wanted, from_step=args.from_checkpoint)
    if args.json:
        for one in replays:
            print(json.dumps(replay_step_show.as_json(one)))
    else:
        print(replay_step_show.render(replays))
    return 0 if all(one.equal for one in replays) else 1
