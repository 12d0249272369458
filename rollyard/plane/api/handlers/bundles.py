"""Requests about bundles and traces."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollyard.core.errors import Error
from rollyard.core.plane import ApiKey
from rollyard.plane.http.wire import answer, body, refusal
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.shapes import rfc3339


class Upload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: str
    size: int
    minutes: float = 5.0


class Download(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    minutes: float = 5.0


class BundleHandlers:
    def __init__(self, parts: PlaneParts, public_url: str | None) -> None:
        self._bundles, self._traces, self._public_url = parts.bundles, parts.traces, public_url

    async def upload(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, Upload)
        base_url = self._public_url or str(request.base_url)
        url, ends = await self._bundles.upload_url(asked.sha256, asked.size, caller.owner, asked.minutes, base_url)
        there = await self._bundles.has(asked.sha256, caller.owner)
        return answer({"url": url, "expires_at": rfc3339(ends), "exists": there})

    async def download(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, Download)
        base_url = self._public_url or str(request.base_url)
        url, ends = await self._bundles.download_url(request.path_params["sha256"], caller, asked.minutes, base_url)
        return answer({"url": url, "expires_at": rfc3339(ends)})

    async def trace(self, request: Request, caller: ApiKey) -> Response:
        return answer(await self._traces.chain(request.path_params["id"], caller))

    # signed: nobody is asked for a key

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/bundles/{signed}", self._receive, methods=["PUT"]),
            Route("/bundles/{signed}", self._send, methods=["GET"]),
        ]

    async def _receive(self, request: Request) -> Response:
        try:
            new = await self._bundles.receive(request.path_params["signed"], request.stream())
        except Error as error:
            return refusal(error)
        return answer({"new": new}, 201 if new else 200)

    async def _send(self, request: Request) -> Response:
        try:
            data = await self._bundles.send(request.path_params["signed"])
        except Error as error:
            return refusal(error)
        return Response(data, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"})
