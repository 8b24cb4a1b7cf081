"""From `anabranch view RUN` to the first useful screen, in Debian's Chromium.

    .venv/bin/python -I benchmarks/viewer_start.py runs/demo

Prints one JSON object: seconds from the start of the process to the address it prints, and to the overview's charts in the browser, medians. The
browser runs already, as it does where a person types the command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    printed, painted = [], []
    command = [sys.executable, "-I", "-m", "anabranch.cli.main", "view", args.run, "--port", "0"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(args.rounds):
            page = browser.new_page()
            began = time.monotonic()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                address = process.stdout.readline().removeprefix("viewer: ").strip()
                printed.append(time.monotonic() - began)
                page.goto(address)
                page.wait_for_selector(".charts svg")
                painted.append(time.monotonic() - began)
            finally:
                process.kill()
                process.communicate()
            page.close()
        browser.close()
    found = {
        "rounds": args.rounds,
        "printed_s": statistics.median(printed),
        "painted_s": statistics.median(painted),
        "slowest_s": max(painted),
    }
    print(json.dumps({key: round(value, 2) for key, value in found.items()}))


if __name__ == "__main__":
    main()
