"""The viewer in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from anabranch.schemas.metrics import StepRecord
from anabranch.transport.metrics_log import MetricsLog
from tests.replay_runs import GROUPS, HOSTILE, T0_MS, Made, changed, write_recorded, write_run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
CHROMIUM = shutil.which("chromium")
HOSTILE_PAGE = "/trajectory/west/west-0-cd/1/1"
PAGES = ["/", "/trajectories", HOSTILE_PAGE, "/steps", "/steps/1/1", "/weights", "/nowhere"]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no browser: install chromium and fonts-dejavu-core")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


def many() -> list[Made]:
    return [changed(GROUPS[0], index=100 + i, seq=100 + i, rewards=(0.0, float(i % 2))) for i in range(150)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_run(tmp_path_factory.mktemp("runs") / "seen", [*GROUPS, *many()], rows_per_file=80)
    log = MetricsLog(made)
    for number in (1, 2, 3):
        log.append(
            StepRecord(
                time_ms=T0_MS + number, step=number, steps_total=3, epoch=1, version=number - 1, reward_mean=0.1 * number, reward_std=0.1, loss=0.1,
                grad_norm=1.0, lr=1e-4, groups=2, rollouts=4, tokens=12, zero_advantage_fraction=0.0, age_tokens={0: 12}, in_flight_age_mean=0.0,
                in_queue_age_mean=1.0, ratio_mean=1.0, ratio_max=1.1, kl_k1=0.0, kl_k3=0.0, ess_token=1.0, masked_fraction=0.0, kept_mass=1.0,
                wait_s=0.1, step_s=0.1, publish_s=0.1, delta_bytes=10, full_bytes=20, changed_fraction=0.5, versions_served={"p": f"e1.v{number}"},
            )
        )  # fmt: skip
    log.close()
    return made


@contextlib.contextmanager
def viewing(run: Path) -> Iterator[str]:
    """The address of a viewer of that run."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "anabranch.cli.main", "view", str(run), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        assert line.startswith("viewer: http://127.0.0.1:"), line
        yield line.removeprefix("viewer: ").strip().rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with viewing(run) as found:
        yield found


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.wrong: list[str] = []
        page.set_default_timeout(15_000)
        page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        page.on("request", self._requested)

    def _requested(self, request: Any) -> None:
        if urlparse(request.url).netloc != urlparse(self.address).netloc and not request.url.startswith("data:"):
            self.wrong.append(f"asked for {request.url}")

    def go(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page


@pytest.fixture
def watched(browser: Browser, address: str) -> Iterator[Watched]:
    context = browser.new_context(viewport=WIDE)
    made = Watched(context.new_page(), address)
    yield made
    context.close()
    assert [text for text in made.wrong if "404" not in text] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_page_fits_and_is_quiet(watched: Watched, size: Any, scheme: Any):
    watched.page.set_viewport_size(size)
    watched.page.emulate_media(color_scheme=scheme)
    for path in PAGES:
        page = watched.go(path)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path} is {wide} px too wide"
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") is (scheme == "light")


def test_the_theme_can_be_chosen_and_is_kept(watched: Watched):
    page = watched.go("/")
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_filters_sorting_and_pages_are_in_the_address(watched: Watched):
    page = watched.go("/trajectories")
    page.fill('input[name="fate"]', "trained")
    page.press('input[name="fate"]', "Enter")
    expect(page.locator(".count")).to_have_text("1 to 50 of 306")
    page.click('th a:text("reward")')
    assert "sort=reward%3Adesc" in page.url
    assert "fate=trained" in page.url
    expect(page.locator('th[aria-sort="descending"]')).to_have_text("reward")
    page.click("[rel=next]")
    expect(page.locator(".count")).to_have_text("51 to 100 of 306")
    again = watched.go(urlparse(page.url).path + "?" + urlparse(page.url).query)
    expect(again.locator(".count")).to_have_text("51 to 100 of 306")


def test_a_filter_that_is_wrong_is_told(watched: Watched):
    watched.wrong.clear()
    page = watched.go("/trajectories?step=x")
    expect(page.locator(".error")).to_contain_text("is not a step")
    watched.wrong = [text for text in watched.wrong if "400" not in text]


def test_keys_lead_through_the_viewer(watched: Watched):
    page = watched.go("/")
    page.keyboard.press("t")
    page.wait_for_url("**/trajectories")
    page.keyboard.press("j")
    page.keyboard.press("j")
    row = page.locator(".rows tr.at .open")
    expect(row).to_have_count(1)
    name = row.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/trajectory/{name}")
    page.keyboard.press("c")
    expect(page.locator("#tokens")).to_have_attribute("data-by", "difference")
    page.keyboard.press("w")
    page.wait_for_url("**/weights")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    page.wait_for_url("**/trajectories")
    page.keyboard.press("n")
    page.wait_for_url("**page=2")
    page.keyboard.press("/")
    expect(page.locator('input[name="step"]')).to_be_focused()


def test_tokens_tell_their_numbers(watched: Watched):
    page = watched.go(HOSTILE_PAGE)
    page.hover(".tokens .t >> nth=1")
    expect(page.locator("#tells")).to_contain_text("token 1: id 9")
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tells")).to_contain_text("token 0: id 7")
    page.click('[data-way="version"]')
    assert page.url.endswith("?by=version")
    page.reload()
    expect(page.locator("#tokens")).to_have_attribute("data-by", "version")


def test_text_that_is_markup_is_shown_as_text(watched: Watched):
    page = watched.go(HOSTILE_PAGE)
    expect(page.locator(".group .this pre")).to_contain_text("<script>alert('x')</script>")
    expect(page.locator(".group .this pre")).to_contain_text("\\u202eevil")
    assert "<script>" in HOSTILE
    assert page.locator("main script").count() == 0


def test_what_comes_is_seen_without_reloading(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "live")
    with viewing(run) as address:
        context = browser.new_context(viewport=WIDE)
        live = Watched(context.new_page(), address)
        page = live.go("/trajectories")
        expect(page.locator(".count")).to_have_text(re.compile("of 14$"))
        page.check("#live")
        write_recorded(run, [changed(GROUPS[3], index=9, seq=9)])
        expect(page.locator(".count")).to_have_text(re.compile("of 16$"), timeout=20_000)
        assert live.wrong == []
        context.close()


def test_without_scripts_everything_can_be_read(browser: Browser, address: str):
    context = browser.new_context(viewport=WIDE, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/trajectories")
    page.click(".rows .open >> nth=0")
    page.click('a:text("mask")')
    assert page.url.endswith("?by=mask")
    assert page.locator("#tokens").get_attribute("data-by") == "mask"
    context.close()
