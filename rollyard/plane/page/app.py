"""The page's routes. `page_app(store)` is a Starlette application; the control plane mounts it, `rollyard view` serves it.

Every answer carries the same strict headers. Anything that changes something needs the token, by form field, and only exists
when one was given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hmac import compare_digest
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rollyard.core.errors import ConfigError, Error, StoreError
from rollyard.plane.page import views
from rollyard.plane.page.words import FILTERS
from rollyard.store import Store

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STATIC = Path(__file__).parent / "static"


class Actions(Protocol):
    """What a person with the token may do. Starting returns the new rollout's id."""

    def choices(self) -> Mapping[str, Any]: ...
    async def start(self, form: Mapping[str, str]) -> str: ...
    async def cancel(self, rollout_id: str) -> bool: ...
    async def rescore(self, rollout_id: str) -> None: ...


def page_app(store: Store, *, actions: Actions | None = None, token: str | None = None) -> Starlette:
    """Read-only without `actions` and `token`."""
    if (actions is None) != (token is None):
        raise ConfigError("actions need a token, and a token is for actions")
    page = _Page(store, actions, token)
    return Starlette(
        routes=[
            Route("/", page.runs),
            Route("/runs/{run_id}", page.run),
            Route("/runs/{run_id}/tasks/{task_id:path}", page.task),
            Route("/runs/{run_id}/report.html", page.report),
            Route("/rollouts/{rollout_id}", page.rollout),
            Route("/rollouts/{rollout_id}/steps", page.steps),
            Route("/rollouts/{rollout_id}/tokens", page.tokens),
            Route("/rollouts/{rollout_id}/raw/{call_id}", page.raw),
            Route("/rollouts/{rollout_id}/files/{name:path}", page.file),
            Route("/compare", page.compare),
            Route("/live", page.live),
            Route("/start", page.start, methods=["GET", "POST"]),
            Route("/rollouts/{rollout_id}/cancel", page.cancel, methods=["POST"]),
            Route("/rollouts/{rollout_id}/rescore", page.rescore, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        middleware=[],
        exception_handlers={Error: _refused, HTTPException: _http},
    )


def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("rollyard.plane.page"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    return made


_JINJA = environment()


def _html(request: Request, name: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    root = request.scope.get("root_path", "").rstrip("/")
    query = dict(request.query_params)

    def again(**changes: Any) -> str:
        """This page's address with some query fields changed."""
        merged = {k: v for k, v in {**query, **changes}.items() if v not in (None, "")}
        return f"{request.url.path}?{urlencode(merged)}" if merged else request.url.path

    text = _JINJA.get_template(name).render(root=root, query=query, again=again, **fields)
    return HTMLResponse(text, status_code=status, headers=HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, ConfigError | StoreError) else 500
    return _html(request, "error.html", status=status, message=str(error), writable=False)


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "the page failed"
    return _html(request, "error.html", status=status, message=detail, writable=False)


def _number(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdigit() and len(text) < 10 else default


class _Page:
    def __init__(self, store: Store, actions: Actions | None, token: str | None) -> None:
        self._store, self._actions, self._token = store, actions, token

    def _show(self, request: Request, name: str, **fields: Any) -> HTMLResponse:
        return _html(request, name, writable=self._actions is not None, **fields)

    async def runs(self, request: Request) -> Response:
        shown = await views.runs(
            self._store, offset=_number(request, "offset"), search=request.query_params.get("q", "")
        )
        return self._show(request, "runs.html", **shown)

    async def run(self, request: Request) -> Response:
        shown = await views.run(self._store, request.path_params["run_id"], dict(request.query_params))
        return self._show(request, "run.html", **shown)

    async def task(self, request: Request) -> Response:
        query = {**request.query_params, "task": request.path_params["task_id"]}
        shown = await views.run(self._store, request.path_params["run_id"], query)
        return self._show(request, "run.html", **shown)

    async def report(self, request: Request) -> Response:
        text = await views.report_html(self._store, request.path_params["run_id"])
        headers = {"Content-Disposition": 'attachment; filename="report.html"', "X-Content-Type-Options": "nosniff"}
        return Response(text, media_type="text/html", headers=headers)

    async def rollout(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        try:
            shown = await views.rollout(self._store, rollout_id, branch=_number(request, "branch"))
        except Error:
            running = await views.under_way(self._store, rollout_id)
            if running is None:
                raise
            return self._show(request, "live.html", **running)
        return self._show(request, "rollout.html", **shown)

    async def steps(self, request: Request) -> Response:
        shown = await views.steps(
            self._store,
            request.path_params["rollout_id"],
            branch=_number(request, "branch"),
            start=_number(request, "from"),
        )
        return self._show(request, "steps.html", **shown)

    async def tokens(self, request: Request) -> Response:
        shown = await views.tokens(
            self._store,
            request.path_params["rollout_id"],
            branch=_number(request, "branch"),
            start=_number(request, "from") if "from" in request.query_params else None,
        )
        return self._show(request, "tokens.html", **shown)

    async def raw(self, request: Request) -> Response:
        found = await views.raw(self._store, request.path_params["rollout_id"], request.path_params["call_id"])
        return Response(found, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def file(self, request: Request) -> Response:
        data = await views.file(self._store, request.path_params["rollout_id"], request.path_params["name"])
        headers = {**HEADERS, "Content-Disposition": "attachment"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def compare(self, request: Request) -> Response:
        first, second = request.query_params.get("a", ""), request.query_params.get("b", "")
        return self._show(request, "compare.html", **await views.compare(self._store, first, second))

    async def live(self, request: Request) -> Response:
        """What changed past event number `after`, as JSON; the page's script asks and redraws."""
        run_id = request.query_params.get("run") or None
        rollout_id = request.query_params.get("rollout") or None
        found = await views.live(self._store, run_id, rollout_id, _number(request, "after"))
        return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)

    # what needs the token

    async def start(self, request: Request) -> Response:
        actions = self._writable()
        if request.method == "GET":
            return self._show(request, "start.html", **actions.choices(), form=dict(request.query_params), problem=None)
        form = await self._form(request)
        try:
            rollout_id = await actions.start(form)
        except Error as error:
            shown = {k: v for k, v in form.items() if k != "token"}
            page = self._show(request, "start.html", **actions.choices(), form=shown, problem=str(error))
            page.status_code = 400
            return page
        return self._go(request, f"/rollouts/{rollout_id}")

    async def cancel(self, request: Request) -> Response:
        return await self._act(request, self._writable().cancel)

    async def rescore(self, request: Request) -> Response:
        return await self._act(request, self._writable().rescore)

    async def _act(self, request: Request, action: Callable[[str], Awaitable[Any]]) -> Response:
        await self._form(request)
        rollout_id = request.path_params["rollout_id"]
        await action(rollout_id)
        return self._go(request, f"/rollouts/{rollout_id}")

    def _go(self, request: Request, path: str) -> Response:
        return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + path, status_code=303, headers=HEADERS)

    def _writable(self) -> Actions:
        if self._actions is None:
            raise HTTPException(403, "this page is read-only; start it with a token to allow changes")
        return self._actions

    async def _form(self, request: Request) -> dict[str, str]:
        form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
        if self._token is None or not compare_digest(form.get("token", ""), self._token):
            raise HTTPException(403, "the token is missing or wrong")
        return form
