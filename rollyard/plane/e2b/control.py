"""The control half: create, find, list, extend, pause and end sandboxes over REST."""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import Error, SandboxGone
from rollyard.core.sandbox import SandboxInfo, SandboxSpec
from rollyard.plane.e2b.boxes import Boxes, described
from rollyard.plane.e2b.errors import Refusal, rest

_PAGE = 100
_MAX_BODY = 2**20
Endpoint = Callable[[Request], Awaitable[Response]]


class Control:
    """`key` None lets everybody in: for loopback only."""

    def __init__(self, boxes: Boxes, *, key: str | None, spec: SandboxSpec) -> None:
        self._boxes, self._key, self._spec = boxes, key, spec

    def routes(self) -> list[Route]:
        def both(path: str, endpoint: Endpoint, method: str) -> list[Route]:
            guarded = self._guarded(endpoint)
            return [Route(f"{version}{path}", guarded, methods=[method]) for version in ("", "/v2")]

        refused = ["/sandboxes/{id}/fork", "/sandboxes/{id}/network", "/templates/{id}", "/volumes", "/snapshots"]
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
            *(Route(path, self._guarded(_refused), methods=["GET", "POST", "PUT", "DELETE"]) for path in refused),
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            given = request.headers.get("x-api-key", "")
            if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
                return rest(Refusal("unauthenticated", "the API key is not known here"))
            try:
                return await endpoint(request)
            except SandboxGone:
                return JSONResponse({"code": 404, "message": "Sandbox not found"}, 404)
            except (Error, Refusal) as error:
                return rest(error)

        return answer

    async def create(self, request: Request) -> Response:
        box = await self._boxes.create(await _json(request), request.headers.get("idempotency-key"))
        return JSONResponse(self._boxes.made(box), 201)

    async def connect(self, request: Request) -> Response:
        asked = await _json(request)
        box = await self._boxes.find(request.path_params["id"])
        paused = await self._state(box.sandbox.id) == "paused"
        if paused:
            await box.sandbox.resume()
        if asked.get("timeout") and box.sandbox.capabilities.extend:
            info = await self._info(box.sandbox.id)
            if info.expires_at is None or info.expires_at < time.time() + float(asked["timeout"]):
                await box.sandbox.extend(float(asked["timeout"]))
        return JSONResponse(self._boxes.made(box), 201 if paused else 200)

    async def get(self, request: Request) -> Response:
        await self._boxes.find(request.path_params["id"])
        return JSONResponse(described(await self._info(request.path_params["id"]), self._spec))

    async def _info(self, sandbox_id: str) -> SandboxInfo:
        for info in await self._boxes.list({}):
            if info.id == sandbox_id:
                return info
        raise SandboxGone(f"sandbox {sandbox_id} is gone")

    async def _state(self, sandbox_id: str) -> str:
        return (await self._info(sandbox_id)).state

    async def list(self, request: Request) -> Response:
        query = request.query_params
        wanted = parse_qs(query.get("metadata", ""), keep_blank_values=True)
        metadata = {unquote(name): unquote(values[-1]) for name, values in wanted.items()}
        states = {state for part in query.getlist("state") for state in part.split(",") if state}
        found = [described(info, self._spec) for info in await self._boxes.list(metadata)]
        if states:
            found = [one for one in found if one["state"] in states]
        if query.get("order") == "asc":
            found.reverse()
        after = _cursor(query.get("nextToken"))
        start = next((at + 1 for at, one in enumerate(found) if one["sandboxID"] == after), 0) if after else 0
        limit = max(1, min(_PAGE, int(query.get("limit") or _PAGE)))
        page = found[start : start + limit]
        headers: dict[str, str] = {}
        if start + limit < len(found):
            headers["x-next-token"] = base64.urlsafe_b64encode(page[-1]["sandboxID"].encode()).decode()
        return JSONResponse(page, headers=headers)

    async def delete(self, request: Request) -> Response:
        if not await self._boxes.kill(request.path_params["id"]):
            raise SandboxGone("gone")
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        asked = await _json(request)
        box = await self._boxes.find(request.path_params["id"])
        await box.sandbox.extend(_seconds(asked.get("timeout")))
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        asked = await _json(request)
        box = await self._boxes.find(request.path_params["id"])
        await box.sandbox.extend(_seconds(asked.get("duration") or 300))
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        box = await self._boxes.find(request.path_params["id"])
        if await self._state(box.sandbox.id) == "paused":
            raise Refusal("already_exists", "the sandbox is paused already")
        await box.sandbox.pause()
        return Response(status_code=204)

    async def snapshot(self, request: Request) -> Response:
        asked = await _json(request)
        box = await self._boxes.find(request.path_params["id"])
        made = await box.sandbox.snapshot()
        return JSONResponse({"snapshotID": made, "names": [asked["name"]] if asked.get("name") else []}, 201)


async def _refused(request: Request) -> Response:
    raise Refusal("unimplemented", f"{request.method} {request.url.path} is not served here")


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise Refusal("invalid_argument", "the request is too large", 413)
    try:
        return msgspec.json.decode(bytes(body), type=dict[str, Any]) if body else {}
    except msgspec.MsgspecError as error:
        raise Refusal("invalid_argument", f"not a JSON object: {error}") from error


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or value < 0:
        raise Refusal("invalid_argument", "timeout must be a number of seconds")
    return max(float(value), 1.0)


def _cursor(token: str | None) -> str | None:
    try:
        return base64.urlsafe_b64decode(token).decode() if token else None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise Refusal("invalid_argument", "nextToken is not one of ours") from error
