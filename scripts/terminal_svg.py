"""A terminal's content as SVG, for the README.

tmux capture-pane -e -p -t SESSION > capture.ansi
python -I scripts/terminal_svg.py capture.ansi docs/images/demo.svg --title "make demo"
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--title", default="anabranch demo")
    args = parser.parse_args()
    lines = args.capture.read_text(encoding="utf-8").rstrip().splitlines()
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=args.title), flags=re.DOTALL)  # remote fonts
    args.svg.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
