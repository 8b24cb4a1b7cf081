"""What the viewer answers, and to whom."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from anabranch.consumers.viewer.guard import COOKIE, HEADERS, LOOPBACK_NAMES, MOST_URL_BYTES, Guard

TOKEN = "a-token"


def client(*, hosts=LOOPBACK_NAMES, token=None, base="http://127.0.0.1:8765") -> TestClient:
    inner = Starlette(routes=[Route("/{rest:path}", lambda request: PlainTextResponse("shown"))])
    return TestClient(Guard(inner, hosts=hosts, token=token), base_url=base, follow_redirects=False)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(method: str):
    answer = client().request(method, "/")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("base", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://localhost"])
def test_names_of_this_machine_are_answered(base: str):
    assert client(base=base).get("/").text == "shown"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "localhost.evil:1:2"]
)
def test_other_names_that_lead_here_are_not(host: str):
    assert client().get("/", headers={"host": host}).status_code == 421


def test_every_answer_says_what_a_page_may_do():
    for answer in (client().get("/"), client().post("/"), client(hosts=None, token=TOKEN).get("/")):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_a_long_address_is_refused_before_anything_reads_it():
    assert client().get("/?text=" + "x" * MOST_URL_BYTES).status_code == 414


def test_without_the_token_nothing_is_shown():
    guarded = client(hosts=None, token=TOKEN, base="http://node7:1")
    assert guarded.get("/").status_code == 403
    assert guarded.get("/?token=wrong").status_code == 403
    assert guarded.get("/", headers={"cookie": f"{COOKIE}=wrong"}).status_code == 403
    assert guarded.get("/?token=").status_code == 403
    assert "shown" not in guarded.get("/?token=wrong").text


def test_the_token_becomes_a_cookie_and_leaves_the_address():
    guarded = client(hosts=None, token=TOKEN, base="http://node7:1")
    answer = guarded.get(f"/trajectories?fate=age&token={TOKEN}&sort=reward")
    assert (answer.status_code, answer.headers["location"]) == (303, "/trajectories?fate=age&sort=reward")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert guarded.get("/trajectories").text == "shown", "the client keeps it"


def test_an_open_viewer_without_a_token_cannot_be_made():
    with pytest.raises(ValueError, match="needs a token"):
        client(hosts=None)
