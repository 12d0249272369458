"""Templates to answers: everything escaped, the same strict headers on every page, errors as pages."""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rollyard.core.errors import ConfigError, PlaneNotFound, StoreError
from rollyard.page.formats import FILTERS

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("rollyard.page"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    return made


def page(request: Request, name: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    """`again(...)` in a template is the page's own address with some query fields changed."""
    root = request.scope.get("root_path", "").rstrip("/")
    query = dict(request.query_params)

    def again(**changes: Any) -> str:
        merged = {k: v for k, v in {**query, **changes}.items() if v not in (None, "")}
        return f"{request.url.path}?{urlencode(merged)}" if merged else request.url.path

    text = environment().get_template(name).render(root=root, query=query, again=again, **fields)
    return HTMLResponse(text, status_code=status, headers=HEADERS)


async def refuse(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, ConfigError | StoreError | PlaneNotFound) else 500
    return page(request, "error.html", status=status, message=str(error), writable=False, planed=False)


async def http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "the page failed"
    return page(request, "error.html", status=status, message=detail, writable=False, planed=False)
