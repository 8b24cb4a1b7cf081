"""What stands between the network and the viewer's pages.

Invariant: nothing is answered that is not a GET or HEAD of bounded length, for a host name that was agreed on, with the token where there is one;
every answer carries headers that keep a page from loading, framing or running anything that is not the viewer's own. Tokens are
compared in constant time and stand in no log and no link. Held by tests/unit/consumers/test_viewer_guard.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE, PARAMETER = "anabranch_view", "token"
MOST_URL_BYTES = 8192
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware.

    Args:
        hosts: names under which the viewer may be asked for (so that no other site's name leads here); None: any, which
            needs a token.
        token: None: none is asked for.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] | None, token: str | None) -> None:
        if hosts is None and token is None:
            raise ValueError("a viewer that any host may be asked for needs a token")
        self._app, self._hosts, self._token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        refused = self._refuse(Request(scope))
        await (refused or self._app)(scope, receive, with_headers)

    def _refuse(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("The viewer only shows: GET and HEAD.\n", 405, headers={"allow": "GET, HEAD"})
        query = request.scope["query_string"]
        if len(request.scope.get("raw_path") or b"") + len(query) > MOST_URL_BYTES:
            return PlainTextResponse("This address is too long for the viewer.\n", 414)
        if self._hosts is not None and _name(request.headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("The viewer is not asked for by that name.\n", 421)
        return self._ask_for_token(request, query) if self._token is not None else None

    def _ask_for_token(self, request: Request, query: bytes) -> Response | None:
        assert self._token is not None
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in pairs if key == PARAMETER]
        if given:
            if not _same(given[0], self._token):
                return PlainTextResponse("That is not this viewer's token.\n", 403)
            rest = urlencode([pair for pair in pairs if pair[0] != PARAMETER])
            answer = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not _same(request.cookies.get(COOKIE, ""), self._token):
            return PlainTextResponse(
                "This viewer wants a token: open the address that `anabranch view` printed.\n", 403
            )
        return None


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _name(host: str) -> str:
    """The name in a Host header, without port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
