"""Pictures of the viewer for the docs, of a finished demo run, by Debian's Chromium.

anabranch view runs/sample --port 8771 &
.venv/bin/python -I scripts/screenshots.py http://127.0.0.1:8771 docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 760}


def main(address: str, folder: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )

        def take(name: str, path: str, size: Any, scheme: Any) -> None:
            context = browser.new_context(viewport=size, color_scheme=scheme)
            page = context.new_page()
            page.goto(address + path)
            place = Path(folder) / f"viewer-{name}.png"
            page.screenshot(path=str(place))
            Image.open(place).convert("RGB").quantize(64).save(place, optimize=True)  # a third of the bytes
            context.close()

        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/trajectories?fate=trained&sort=tokens:desc")
        one = page.locator(".rows .open").first.get_attribute("href") or "/"
        page.goto(f"{address}/steps")
        step = page.locator(".rows .open").first.get_attribute("href") or "/"
        context.close()
        take("overview", "/", WIDE, "light")
        take("trajectories", "/trajectories?fate=trained&sort=ratio_max:desc", WIDE, "light")
        take("trajectory", one, WIDE, "dark")
        take("step", step, WIDE, "light")
        take("phone", one, PHONE, "light")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
