"""Write tests/golden/ anew, on purpose: `.venv/bin/python -I scripts/make_golden.py --yes`.

The committed bytes stand for every program of this version that is out there. Run this only when a wire format has
got a new major version; without --yes it says which files would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for tests.golden: this script runs isolated (-I)

from tests.golden.samples import FILES  # noqa: E402 - needs the path above


def main(write: bool) -> int:
    folder = ROOT / "tests" / "golden"
    changed = 0
    for name, make in FILES.items():
        path, content = folder / name, make()
        if path.exists() and path.read_bytes() == content:
            continue
        changed += 1
        print(f"{'wrote' if write else 'would change'} {path.relative_to(ROOT)} ({len(content)} bytes)")
        if write:
            path.write_bytes(content)
    print(f"{changed} of {len(FILES)} files differ" + ("" if write or not changed else "; --yes writes them"))
    return 0


if __name__ == "__main__":
    sys.exit(main("--yes" in sys.argv[1:]))
