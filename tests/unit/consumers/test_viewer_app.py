"""The viewer's pages over a recorded run with hostile text, drops of several kinds, and records of steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.viewer.app import Viewed, make_app
from tests.replay_runs import GROUPS, changed, write_recorded, write_run

HOSTILE_PAGE = "/trajectory/west/west-0-cd/1/1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    with RunReader(run) as reader:
        app = make_app(Viewed("<run>", reader, lambda token: f"<b>{token}", 8), hosts=("testserver",))
        yield TestClient(app, raise_server_exceptions=False)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


PAGES = [
    "/",
    "/trajectories",
    "/trajectories?fate=trained&sort=ratio_max:desc",
    HOSTILE_PAGE,
    f"{HOSTILE_PAGE}?by=mask",
    "/steps",
    "/steps/1/1",
    "/weights",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_whole_and_loads_nothing_from_elsewhere(client: TestClient, page: str):
    answer = client.get(page)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    tags = Tags(answer.text).tags
    assert [attributes for tag, attributes in tags if tag == "script"] == [{"src": "/static/viewer.js", "defer": None}]
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("href", "src", "action"):
            assert (attributes.get(name) or "/").startswith(("/", "?", "#")), (tag, attributes)
    assert "<b>" not in re.sub(r"<b>[^<]*</b>", "", answer.text), "a tokenizer's piece is text"


@pytest.mark.parametrize("page", ["/trajectories", HOSTILE_PAGE, "/trajectories?text=%3Cscript%3E"])
def test_what_a_model_wrote_is_text(client: TestClient, page: str):
    text = client.get(page).text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert not set("\x1b\u202e\r") & set(text)


def test_the_overview_tells_how_it_goes(client: TestClient):
    text = client.get("/").text
    assert "running" in text
    assert "zero_variance" in text
    assert "held-out" in text


def test_a_trajectory_has_its_life_its_group_and_its_tokens(client: TestClient):
    text = client.get(HOSTILE_PAGE).text
    assert 'data-by="ratio"' in text
    assert "sampled by e2.v1" in text
    assert "trained in step 2 of epoch 2" in text
    assert 'href="/trajectory/west/west-0-cd/1/0?by=ratio"' in text


def test_a_group_leads_to_its_first_rollout(client: TestClient):
    answer = client.get("/trajectory/west/west-0-cd/1", follow_redirects=False)
    assert answer.headers["location"] == "/trajectory/west/west-0-cd/1/0"


def test_a_step_shows_its_rollouts_and_how_to_run_it_again(client: TestClient):
    text = client.get("/steps/1/1").text
    assert "anabranch replay step 1 --epoch 1" in text
    assert 'href="/trajectory/east/east-0-ab/1/0"' in text


@pytest.mark.parametrize(
    ("page", "status", "why"),
    [("/trajectories?page=x", 400, "page"), ("/trajectory/nonsense", 400, "no id of a trajectory"), ("/trajectory/east/nobody/1/0", 400, "nothing is recorded of"),
     ("/trajectory/west/west-0-cd/1/9", 400, "has no rollout 9"), (f"{HOSTILE_PAGE}?by=zzz", 400, "by: one of"), ("/steps/9/9", 400, "neither metrics.jsonl"),
     ("/steps?page=0", 400, "page"), ("/steps/1/99999999999999999999", 400, "no step has such a number"), ("/nowhere", 404, "no such page"), ("/static/../app.py", 404, "no such page"),
     ("/static/secret", 404, "no such page")],
)  # fmt: skip
def test_a_wrong_address_is_a_page_that_says_what_is_wrong(client: TestClient, page: str, status: int, why: str):
    answer = client.get(page)
    assert (answer.status_code, why in answer.text) == (status, True), answer.text
    assert "Traceback" not in answer.text


def test_what_an_address_says_comes_back_as_text(client: TestClient):
    text = client.get('/trajectories?step="><script>alert(1)</script>').text
    assert "<script>alert" not in text


def test_a_bug_shows_nothing_of_itself(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("anabranch.consumers.viewer.app.overview", broken)
    answer = client.get("/")
    assert (answer.status_code, "a secret" in answer.text) == (500, False)
    assert "content-security-policy" in answer.headers


def test_a_run_that_goes_on_is_seen_as_it_is_then(client: TestClient, run: Path):
    assert "of 14" in client.get("/trajectories").text
    write_recorded(run, [changed(GROUPS[3], index=9, seq=9)])
    assert "of 16" in client.get("/trajectories").text


def test_a_run_with_nothing_in_it_has_pages(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    with RunReader(tmp_path) as reader:
        bare = TestClient(make_app(Viewed("bare", reader), hosts=("testserver",)), raise_server_exceptions=False)
        for page in ("/", "/trajectories", "/steps", "/weights"):
            assert bare.get(page).status_code == 200, page


def test_files_of_the_page_are_served(client: TestClient):
    assert client.get("/static/viewer.css").headers["content-type"].startswith("text/css")
    assert client.get("/static/viewer.js").headers["content-type"].startswith("text/javascript")
    assert client.head("/").status_code == 200
