"""`anabranch COMMAND`: one program for every process of the pipeline.

Invariant: exit codes are those of schemas/errors.py (0 ok, 2 usage, 75 temporary, 76 protocol, 78 configuration),
and a user's mistake is one clear line, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import anabranch
from anabranch.cli.common import HelpFormatter

# commands in the order of --help; the module of `a-b` is a_b. Each has add_parser(subparsers), whose parser sets `run`
COMMANDS = (
    "demo", "learn", "produce", "follow", "record", "replay", "view", "model", "config", "ledger", "stream", "dead-letter", "permits", "weights",
    "checkpoints", "delta", "report", "bench", "chaos",
)  # fmt: skip

EPILOG = """\
examples:
  anabranch demo                              the whole loop on this machine
  anabranch demo --preset smollm2 --steps 50  the same with a 135M-parameter model
  anabranch config --config run.toml          show the resolved configuration
  anabranch learn --config run.toml           on the learner's node
  anabranch produce --config run.toml --region east
  anabranch record --config run.toml

shell completion:
  anabranch --print-completion bash > ~/.local/share/bash-completion/completions/anabranch

exit codes: 0 done, 2 usage, 70 bug, 75 temporary (restart later), 76 bad data from the wire, 78 bad configuration
"""


def build_parser() -> argparse.ArgumentParser:
    import shtab

    parser = argparse.ArgumentParser(
        prog="anabranch", description=anabranch.__doc__, epilog=EPILOG, formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"anabranch {anabranch.__version__}")
    shtab.add_argument_to(parser, ["--print-completion"], help="print a completion script")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"anabranch.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _open_outputs()
        return _main(build_parser().parse_args(argv))
    except KeyboardInterrupt:
        return 130


def _open_outputs() -> None:
    """Started with a closed stdout or stderr (`>&-`, some daemons), a program still does its work."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process is
    # What the terminal's encoding lacks (a cause, a prompt, a name) is shown escaped, as stderr does.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _main(args: argparse.Namespace) -> int:
    from anabranch.schemas.errors import EXIT_INTERNAL, EXIT_TEMPORARY, AnabranchError
    from anabranch.transport.redact import redact_text
    from anabranch.transport.runtime import disk_full

    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except AnabranchError as error:
        print(f"anabranch {args.command}: {redact_text(str(error))}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the program so, with 1
            return 0
        raise
    except BrokenPipeError:  # the reader of our output has gone, e.g. `anabranch ... | head`
        _drop_output()
        return 0
    except Exception as error:  # noqa: BLE001 - the edge of the process: a bug is reported whole, with the code that says so
        if (line := disk_full(error)) is not None:
            print(f"anabranch {args.command}: {line}", file=sys.stderr)
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output()
            return EXIT_TEMPORARY
        print(redact_text(traceback.format_exc()), file=sys.stderr, end="")
        return EXIT_INTERNAL


def _drop_output() -> None:
    """What is left in the buffer is flushed at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
