"""The viewer's pages and their addresses.

Invariant: a page is a function of the run and of its address; reading is all it does. An error of what was asked for is a page that says what to do, and
any other a page without its innards. Held by tests/unit/consumers/test_viewer_app.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from anabranch.consumers.life import life_of
from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.token_values import Piece
from anabranch.consumers.trajectory_page import read_group
from anabranch.consumers.viewer import formats, steps, table, weights
from anabranch.consumers.viewer import trajectory as one_trajectory
from anabranch.consumers.viewer.charts import bars, svg
from anabranch.consumers.viewer.guard import Guard
from anabranch.consumers.viewer.overview import overview
from anabranch.schemas.errors import AnabranchError, UsageError
from anabranch.schemas.trajectory_id import parse_id

STATIC = {"viewer.css": "text/css; charset=utf-8", "viewer.js": "text/javascript; charset=utf-8"}
_LONG_AGO = "max-age=3600"


@dataclass(frozen=True, slots=True)
class Viewed:
    """What is shown. `name`: of the run; `pieces`: its tokenizer, if it is at hand; `max_age`: correction.max_age, if it is known."""

    name: str
    reader: RunReader
    pieces: Piece | None = None
    max_age: int | None = None


def make_app(viewed: Viewed, *, hosts: Collection[str] | None, token: str | None = None) -> Guard:
    """Args: hosts, token: see `Guard`."""
    pages = _Pages(viewed)
    app = Starlette(
        routes=[
            Route("/", pages.overview),
            Route("/trajectories", pages.trajectories),
            Route("/trajectory/{id:path}", pages.trajectory),
            Route("/steps", pages.steps),
            Route("/steps/{epoch:int}/{step:int}", pages.step),
            Route("/weights", pages.weights),
            Route("/static/{name}", pages.static),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
        ],
        exception_handlers={AnabranchError: pages.refused, HTTPException: pages.not_there, Exception: pages.broken},
    )
    return Guard(app, hosts=hosts, token=token)  # around all of it: as middleware it would not see the page of a bug


class _Pages:
    """Starlette runs these in threads: they wait for the reader, which answers one query at a time."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed
        self._templates = Environment(
            loader=PackageLoader("anabranch.consumers.viewer"), autoescape=select_autoescape(default=True),
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters.update(formats.FILTERS)
        self._templates.globals.update(svg=svg, bars=bars, visible=one_trajectory.visible)
        self._static = {name: (files("anabranch.consumers.viewer") / "static" / name).read_bytes() for name in STATIC}
        self._log = structlog.get_logger()

    def overview(self, request: Request) -> Response:
        return self._page("overview.html", "overview", found=overview(self._viewed.reader))

    def trajectories(self, request: Request) -> Response:
        asked = table.parse(request.query_params)
        rows, total = table.read(self._viewed.reader, asked)
        return self._page(
            "trajectories.html", "trajectories", asked=asked, rows=rows, total=total, fields=table.FIELDS, columns=table.columns(),
            first=(asked.number - 1) * asked.rows + 1, query=request.url.query,
        )  # fmt: skip

    def trajectory(self, request: Request) -> Response:
        one = parse_id(request.path_params["id"])
        by = request.query_params.get("by", "ratio")
        if by not in one_trajectory.BY:
            raise UsageError(f"by: one of {', '.join(one_trajectory.BY)}")
        group = read_group(self._viewed.reader, one.group)
        if not group:
            raise UsageError(f"nothing is recorded of {one.group}")
        if one.sample is None:
            return RedirectResponse(f"/trajectory/{group[0]['id']}")
        rows = [row for row in group if row["sample_index"] == one.sample]
        if not rows:
            raise UsageError(f"{one.group} has no rollout {one.sample}: it has {len(group)}")
        return self._page(
            "trajectory.html", "trajectories", row=rows[0], group=group, by=by, ways=one_trajectory.BY,
            tokens=one_trajectory.tokens_of(rows[0], self._viewed.pieces), most=one_trajectory.MOST_TOKENS,
            life=life_of(self._viewed.reader, one, max_age=self._viewed.max_age),
        )  # fmt: skip

    def steps(self, request: Request) -> Response:
        text = request.query_params.get("page", "1")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**7:
            raise UsageError(f"page: {text[:20]!r} is not a number from 1 on")
        rows, total = steps.step_list(self._viewed.reader, number=int(text))
        return self._page("steps.html", "steps", rows=rows, total=total, number=int(text), size=steps.ROWS)

    def step(self, request: Request) -> Response:
        epoch, step = request.path_params["epoch"], request.path_params["step"]
        if max(epoch, step) >= 2**31:
            raise UsageError("no step has such a number")
        return self._page("step.html", "steps", found=steps.step_page(self._viewed.reader, epoch, step))

    def weights(self, request: Request) -> Response:
        return self._page("weights.html", "weights", found=weights.weights_page(self._viewed.reader))

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(404)
        return Response(self._static[name], media_type=STATIC[name], headers={"cache-control": _LONG_AGO})

    def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, AnabranchError)
        status = 400 if isinstance(error, UsageError) else 503
        return self._page("error.html", "", status=status, text=str(error))

    def not_there(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._page("error.html", "", status=error.status_code, text="There is no such page.")

    def broken(self, request: Request, error: Exception) -> Response:
        self._log.error("a page could not be made", path=request.url.path, error=repr(error)[:500])
        return self._page("error.html", "", status=500, text="This page could not be made; the viewer's log says why.")

    def _page(self, template: str, at: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(run=self._viewed.name, at=at, **values)
        return HTMLResponse(text, status, headers={"cache-control": "no-store"})
