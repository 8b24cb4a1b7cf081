"""What the looking kinds of `anabranch replay` do, one function a kind. Loaded only when a command runs.

Held by tests/unit/cli/test_replay_look.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from anabranch.cli.common import config_from
from anabranch.consumers.accounting import account
from anabranch.consumers.find_trajectory import find_group, find_trajectory
from anabranch.consumers.life import life_of
from anabranch.consumers.token_values import Piece, token_pieces
from anabranch.consumers.trajectory_filter import Range, TrajectoryFilter, Versions, check_fate
from anabranch.consumers.trajectory_page import page, read_group
from anabranch.consumers.user_sql import user_query
from anabranch.deploy import (
    replay_diff,
    replay_export,
    replay_life,
    replay_ls,
    replay_rescore,
    replay_show,
)
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_source import Source, open_source
from anabranch.deploy.replay_text import json_value, table, terminal_width
from anabranch.schemas.config import RunConfig, TaskSection, load_config
from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory_id import TrajectoryId, parse_id

FOUND_GAPS = 1
_CELL = 80  # columns of a value in a table of `sql`


def _config(args: argparse.Namespace) -> RunConfig | None:
    """None where --run alone says what is meant."""
    asked = args.config is not None or args.overrides or args.recorded_run is None
    if not asked and args.streams:
        raise UsageError("--streams needs --config: that says where they are")
    return config_from(args) if asked else None


def _source(args: argparse.Namespace) -> AbstractContextManager[Source]:
    return open_source(args.recorded_run, _config(args), streams=args.streams)


def _filter(args: argparse.Namespace) -> TrajectoryFilter:
    def bounds(value: str | None, what: str) -> Range | None:
        return None if value is None else Range.parse(value, what=what)

    return TrajectoryFilter(
        step=bounds(args.step, "a step"),
        version=None if args.version is None else Versions.parse(args.version),
        age=bounds(args.age, "an age"),
        reward=bounds(args.reward, "a reward"),
        tokens=bounds(args.tokens, "a number of tokens"),
        group=bounds(args.group_index, "a group index"),
        region=args.region,
        producer=args.producer,
        fate=None if args.fate is None else check_fate(args.fate),
        text=args.text,
    )


def _pieces(source: Source) -> Piece | None:
    path = source.setting("model", "path")
    return token_pieces(None if path is None else Path(path))


def _ls(args: argparse.Namespace) -> int:
    wanted = _filter(args)
    with _source(args) as source:
        rows, total = page(source.reader, wanted, sort=args.sort, limit=args.limit, number=args.page)
    if args.json:
        if rows:
            print(replay_ls.json_lines(rows))
    else:
        print(replay_ls.render(rows, total, limit=args.limit, page=args.page, width=terminal_width()))
    return 0


def _show(args: argparse.Namespace) -> int:
    with _source(args) as source:
        (row,) = read_group(source.reader, find_trajectory(source.reader, args.id))
        if args.json:
            print(json.dumps(json_value(row)))
        else:
            most = None if args.all_tokens else 64
            print(replay_show.render(row, width=terminal_width(), pieces=_pieces(source), tokens=most))
    return 0


def _why(args: argparse.Namespace) -> int:
    with _source(args) as source:
        one = _known(source, args.id)
        life = life_of(source.reader, one, max_age=source.setting("correction", "max_age"))
    print(
        json.dumps(json_value(replay_life.as_json(life))) if args.json else replay_life.render(life, terminal_width())
    )
    return 0


def _known(source: Source, text: str) -> TrajectoryId:
    """A trajectory or a group; also one of which the fate log alone knows. Raises UsageError."""
    ends = text.split("/")[-2:]
    find = find_trajectory if len(ends) == 2 and all(map(str.isdigit, ends)) else find_group
    try:
        return find(source.reader, text)
    except UsageError:
        try:
            one = parse_id(text)
        except UsageError:
            one = None
        if one is None or not source.reader.rows(
            "SELECT 1 FROM fates WHERE region = ? AND producer = ? AND seq = ?", one.identity
        ):
            raise
        return one


def _diff(args: argparse.Namespace) -> int:
    with _source(args) as source:
        found = [find_trajectory(source.reader, text) for text in (args.a, args.b)]
        a, b = (read_group(source.reader, one)[0] for one in found)
        if args.json:
            print(json.dumps(json_value(replay_diff.compare(a, b))))
        else:
            print(replay_diff.render(a, b, width=terminal_width(), pieces=_pieces(source)))
    return 0


def _group(args: argparse.Namespace) -> int:
    with _source(args) as source:
        rows = read_group(source.reader, find_group(source.reader, args.id))
    if args.json:
        for row in rows:
            print(json.dumps(json_value(row)))
    else:
        print(replay_show.render_group(rows, width=terminal_width(), most_lines=None if args.all_lines else 40))
    return 0


def _export(args: argparse.Namespace) -> int:
    wanted = _filter(args)
    columns = None if args.columns is None else [name.strip() for name in args.columns.split(",")]
    with _source(args) as source:
        count = replay_export.export(
            source.reader, wanted, args.file, form=args.format, columns=columns, limit=args.limit, replace=args.force
        )
    if str(args.file) != "-":
        print(f"{count:,} trajectories in {args.file}")
    return 0


def _sql(args: argparse.Namespace) -> int:
    with _source(args) as source, user_query(source.reader, args.sql, timeout_s=args.timeout) as batches:
        if args.json:
            for batch in batches:
                for row in batch.to_pylist():
                    print(json.dumps(json_value(row)))
            return 0
        rows: list[list[str]] = []
        more = False
        for batch in batches:
            for row in batch.to_pylist():
                more = len(rows) == args.limit
                if more:
                    break
                rows.append([plain("NULL" if v is None else str(json_value(v)), _CELL) for v in row.values()])
            if more:
                break
        names = [plain(name, _CELL) for name in batches.schema.names]
        print("\n".join(table(names, rows, left=range(len(names)))))
        if more:
            print(
                f"anabranch replay: only the first {args.limit:,} rows; --limit N or --json shows more", file=sys.stderr
            )
    return 0


def _rescore(args: argparse.Namespace) -> int:
    wanted = _filter(args)
    with _source(args) as source:
        if args.function is not None:
            scorer = replay_rescore.load_function(args.function)
        else:
            scorer = replay_rescore.task_scorer(*_task(args, source))
        found = replay_rescore.rescore(source.reader, wanted, scorer)
    print(
        json.dumps(json_value(replay_rescore.as_json(found)))
        if args.json
        else replay_rescore.render(found, terminal_width())
    )
    return 0


def _task(args: argparse.Namespace, source: Source) -> tuple[TaskSection, int]:
    """The run's own [task] and seed, with what --set changes; those of --config if it is given. Raises UsageError: neither is known."""
    if args.config is not None:
        config = config_from(args)
    elif source.config_text:
        config = load_config(source.config_text, source="the run's configuration", overrides=args.overrides)
    else:
        raise UsageError("the run left no configuration that names its task: give --config")
    return config.task, config.run.seed


def _recompute(args: argparse.Namespace) -> int:
    from anabranch.cli.replay_recompute_command import recompute

    return recompute(args, _config(args))


def _account(args: argparse.Namespace) -> int:
    with _source(args) as source:
        found = account(source.reader, times=not args.without_times)
    print(json.dumps(replay_life.account_json(found)) if args.json else replay_life.render_account(found))
    return FOUND_GAPS if found.gaps else 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls, "show": _show, "why": _why, "diff": _diff, "group": _group, "export": _export, "sql": _sql,
    "rescore": _rescore, "recompute": _recompute, "account": _account,
}  # fmt: skip
