"""The routes of the control plane's tables, and of the forms by which an operator changes keys and quotas.

A browser sends the admin key by itself once it was typed, to whatever page asks for it; so each form also carries a token that
only these pages show.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hmac import compare_digest
from typing import Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from rollyard.core.errors import ConfigError, PlaneError
from rollyard.core.plane import ROLES, ApiKey
from rollyard.page.planes import PlaneTables
from rollyard.page.query import read_query
from rollyard.page.rendering import HEADERS

KeyCheck = Callable[[str], bool]
Shown = Callable[[Request], Awaitable[Response]]
N = TypeVar("N", int, float)


class Operator(Protocol):
    """What the one with the admin key may change. `form_token` is the same on every replica, and no one can guess it."""

    @property
    def form_token(self) -> str: ...
    async def list_keys(self) -> Sequence[ApiKey]: ...
    async def new_key(self, role: str, owner: str, instance_id: str | None) -> str:
        """The key itself, which is shown this once."""
        ...

    async def revoke_key(self, key_id: str) -> None: ...
    async def set_terms(self, owner: str, quota: int | None, rate: float | None) -> None: ...


def plane_routes(
    show: Callable[..., Response], plane: PlaneTables, key: KeyCheck | None, operator: Operator | None
) -> list[BaseRoute]:
    if operator is not None and key is None:
        raise ConfigError("an operator's forms need a key that opens them")

    async def overview(request: Request) -> Response:
        return show(request, "plane.html", operated=operator is not None, **await plane.overview())

    async def instances(request: Request) -> Response:
        found = await plane.instances(read_query(request))
        return show(request, "instances.html", operated=operator is not None, **found)

    async def instance(request: Request) -> Response:
        return show(request, "instance.html", **await plane.instance(request.path_params["id"]))

    async def hub(request: Request) -> Response:
        return show(request, "hub.html", operated=operator is not None, **await plane.hub(read_query(request)))

    async def quotas(request: Request) -> Response:
        found = await plane.quotas(read_query(request))
        token = None if operator is None else operator.form_token
        return show(request, "quotas.html", operated=operator is not None, token=token, **found)

    routes = [
        Route("/plane", overview),
        Route("/plane/instances", _with_key(instances, key)),
        Route("/plane/instances/{id}", _with_key(instance, key)),
        Route("/plane/hub", _with_key(hub, key)),
        Route("/plane/quotas", _with_key(quotas, key)),
    ]
    return [*routes, *([] if operator is None else _form_routes(show, key, operator))]


def _form_routes(show: Callable[..., Response], key: KeyCheck | None, operator: Operator) -> list[BaseRoute]:
    async def keys(request: Request) -> Response:
        made, problem = None, None
        if request.method == "POST":
            form = await _read_form(request, operator)
            try:
                made = await operator.new_key(
                    form.get("role", ""), form.get("owner", "").strip(), form.get("instance_id", "").strip() or None
                )
            except PlaneError as error:
                problem = str(error)
        listed = sorted(await operator.list_keys(), key=lambda one: one.created_at, reverse=True)
        fields = {"keys": listed, "roles": ROLES, "made": made, "problem": problem, "token": operator.form_token}
        return show(request, "keys.html", operated=True, status=400 if problem else 200, **fields)

    async def revoke(request: Request) -> Response:
        await _read_form(request, operator)
        await operator.revoke_key(request.path_params["id"])
        return _go(request, "/plane/keys")

    async def set_terms(request: Request) -> Response:
        form = await _read_form(request, operator)
        try:
            quota, rate = _number(form, "quota", int), _number(form, "rate", float)
            await operator.set_terms(form.get("owner", "").strip(), quota, rate)
        except PlaneError as error:
            raise HTTPException(400, f"the quota was not changed: {error}") from error
        return _go(request, "/plane/quotas")

    return [
        Route("/plane/keys", _with_key(keys, key), methods=["GET", "POST"]),
        Route("/plane/keys/{id}/revoke", _with_key(revoke, key), methods=["POST"]),
        Route("/plane/quotas", _with_key(set_terms, key), methods=["POST"]),
    ]


async def _read_form(request: Request, operator: Operator) -> Mapping[str, str]:
    form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    if not compare_digest(form.get("token", "").encode(), operator.form_token.encode()):
        raise HTTPException(403, "this form is not of this page; load the page again")
    return form


def _number(form: Mapping[str, str], name: str, kind: Callable[[str], N]) -> N | None:
    """What was typed into a field; None where nothing was."""
    text = form.get(name, "").strip()
    try:
        return kind(text) if text else None
    except ValueError:
        raise HTTPException(
            400, f"the quota was not changed: the {name} {text!r} is no {'whole ' * (kind is int)}number"
        ) from None


def _go(request: Request, path: str) -> Response:
    return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + path, status_code=303, headers=HEADERS)


def _with_key(shown: Shown, key: KeyCheck | None) -> Shown:
    async def answer(request: Request) -> Response:
        if key is None or key(_password(request.headers.get("authorization", ""))):
            return await shown(request)
        headers = {**HEADERS, "WWW-Authenticate": 'Basic realm="the admin key as password", charset="UTF-8"'}
        return Response(
            "the control plane's tables need its admin key\n", 401, media_type="text/plain", headers=headers
        )

    return answer


def _password(header: str) -> str:
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    try:
        return base64.b64decode(rest, validate=True).decode().partition(":")[2] if scheme.lower() == "basic" else ""
    except ValueError:
        return ""
