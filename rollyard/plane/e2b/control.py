"""The control half: create, find, list, extend, pause, copy and end sandboxes over REST."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import Error, SandboxGone
from rollyard.core.plane import ApiKey
from rollyard.plane.e2b.boxes import MOST_FORKS, Boxes, E2bSandbox, described, made
from rollyard.plane.e2b.errors import E2bRefusal, explain, rest

_PAGE = 100
_MAX_BODY = 2**20
Endpoint = Callable[[Request, ApiKey | None], Awaitable[Response]]


class E2bControl:
    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes

    def routes(self) -> list[Route]:
        def both(path: str, endpoint: Endpoint, method: str) -> list[Route]:
            guarded = self._guarded(endpoint)
            return [Route(f"{version}{path}", guarded, methods=[method]) for version in ("", "/v2")]

        refused = ["/sandboxes/{id}/network", "/templates/{id}", "/volumes", "/snapshots"]
        return [
            *both("/sandboxes", self.create, "POST"),
            *both("/sandboxes", self.list, "GET"),
            *both("/sandboxes/{id}", self.get, "GET"),
            *both("/sandboxes/{id}", self.delete, "DELETE"),
            *both("/sandboxes/{id}/connect", self.connect, "POST"),
            *both("/sandboxes/{id}/resume", self.connect, "POST"),
            *both("/sandboxes/{id}/timeout", self.timeout, "POST"),
            *both("/sandboxes/{id}/refreshes", self.refresh, "POST"),
            *both("/sandboxes/{id}/pause", self.pause, "POST"),
            *both("/sandboxes/{id}/snapshots", self.snapshot, "POST"),
            *both("/sandboxes/{id}/fork", self.fork, "POST"),
            *(Route(path, self._guarded(_refused), methods=["GET", "POST", "PUT", "DELETE"]) for path in refused),
        ]

    def _guarded(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request, await self._boxes.admit(request.headers.get("x-api-key", "")))
            except SandboxGone:
                return JSONResponse({"code": 404, "message": "Sandbox not found"}, 404)
            except (Error, E2bRefusal) as error:
                return rest(error)

        return answer

    async def create(self, request: Request, caller: ApiKey | None) -> Response:
        box = await self._boxes.create(caller, await _json(request), request.headers.get("idempotency-key"))
        return JSONResponse(made(box, self._boxes.tokens), 201)

    async def connect(self, request: Request, caller: ApiKey | None) -> Response:
        """A running one again, a paused one woken; its time is made longer, never shorter."""
        asked = await _json(request)
        seen = await self._boxes.seen(caller, request.path_params["id"])
        if seen.state == "paused":
            await self._boxes.resume(caller, seen.id)
        box = await self._boxes.find(seen.id)
        if asked.get("timeout") and box.sandbox.capabilities.extend:
            seconds = _seconds(asked["timeout"])
            if seen.expires_at is None or seen.expires_at < time.time() + seconds:
                await self._boxes.extend(caller, seen.id, seconds)
        return JSONResponse(made(box, self._boxes.tokens), 201 if seen.state == "paused" else 200)

    async def get(self, request: Request, caller: ApiKey | None) -> Response:
        return JSONResponse(described(await self._boxes.seen(caller, request.path_params["id"])))

    async def list(self, request: Request, caller: ApiKey | None) -> Response:
        query = request.query_params
        wanted = parse_qs(query.get("metadata", ""), keep_blank_values=True)
        metadata = {unquote(name): unquote(values[-1]) for name, values in wanted.items()}
        states = {state for part in query.getlist("state") for state in part.split(",") if state}
        found = [described(seen) for seen in await self._boxes.list(caller, metadata)]
        if states:
            found = [one for one in found if one["state"] in states]
        if query.get("order") == "asc":
            found.reverse()
        after = _cursor(query.get("nextToken"))
        start = next((at + 1 for at, one in enumerate(found) if one["sandboxID"] == after), 0) if after else 0
        asked = query.get("limit") or str(_PAGE)
        if not asked.isdigit() or len(asked) > 9:
            raise E2bRefusal("invalid_argument", "limit is not a number")
        limit = max(1, min(_PAGE, int(asked)))
        page = found[start : start + limit]
        headers: dict[str, str] = {}
        if start + limit < len(found):
            headers["x-next-token"] = base64.urlsafe_b64encode(page[-1]["sandboxID"].encode()).decode()
        return JSONResponse(page, headers=headers)

    async def delete(self, request: Request, caller: ApiKey | None) -> Response:
        await self._boxes.kill(caller, request.path_params["id"])
        return Response(status_code=204)

    async def timeout(self, request: Request, caller: ApiKey | None) -> Response:
        asked = await _json(request)
        await self._boxes.extend(caller, request.path_params["id"], _seconds(asked.get("timeout")))
        return Response(status_code=204)

    async def refresh(self, request: Request, caller: ApiKey | None) -> Response:
        asked = await _json(request)
        await self._boxes.extend(caller, request.path_params["id"], _seconds(asked.get("duration") or 300))
        return Response(status_code=204)

    async def pause(self, request: Request, caller: ApiKey | None) -> Response:
        seen = await self._boxes.seen(caller, request.path_params["id"])
        if seen.state == "paused":
            raise E2bRefusal("already_exists", "the sandbox is paused already")
        await self._boxes.pause(caller, seen.id)
        return Response(status_code=204)

    async def snapshot(self, request: Request, caller: ApiKey | None) -> Response:
        asked = await _json(request)
        taken = await self._boxes.snapshot(caller, request.path_params["id"])
        return JSONResponse({"snapshotID": taken, "names": [asked["name"]] if asked.get("name") else []}, 201)

    async def fork(self, request: Request, caller: ApiKey | None) -> Response:
        asked = await _json(request)
        count = asked.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_FORKS:
            raise E2bRefusal("invalid_argument", f"count is from 1 to {MOST_FORKS}")
        seconds = _seconds(asked.get("timeout") or 300)
        outcomes = await self._boxes.fork(caller, request.path_params["id"], seconds, count)
        return JSONResponse([self._outcome(one) for one in outcomes], 201)

    def _outcome(self, outcome: E2bSandbox | Error) -> dict[str, Any]:
        if isinstance(outcome, E2bSandbox):
            return {"sandbox": made(outcome, self._boxes.tokens)}
        told = explain(outcome)
        return {"error": {"code": told.status, "message": told.message}}


async def _refused(request: Request, caller: ApiKey | None) -> Response:
    raise E2bRefusal("unimplemented", f"{request.method} {request.url.path} is not served here")


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise E2bRefusal("invalid_argument", "the request is too large", 413)
    try:
        return msgspec.json.decode(bytes(body), type=dict[str, Any]) if body else {}
    except msgspec.MsgspecError as error:
        raise E2bRefusal("invalid_argument", f"not a JSON object: {error}") from error


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or value < 0:
        raise E2bRefusal("invalid_argument", "timeout must be a number of seconds")
    return max(float(value), 1.0)


def _cursor(token: str | None) -> str | None:
    try:
        return base64.urlsafe_b64decode(token).decode() if token else None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise E2bRefusal("invalid_argument", "nextToken is not one of ours") from error
