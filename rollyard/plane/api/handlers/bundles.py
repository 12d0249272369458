"""Requests about bundles and traces."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollyard.core.errors import Error
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.http.wire import answer, body, refusal
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.shapes import rfc3339


class Upload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: str
    size: int
    minutes: float = 5.0


class Download(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    minutes: float = 5.0


async def begin_upload(call: ApiCall) -> Response:
    wanted = await body(call.request, Upload)
    url, ends = await call.parts.bundles.upload_url(
        wanted.sha256, wanted.size, call.caller.owner, wanted.minutes, call.base_url
    )
    there = await call.parts.bundles.has(wanted.sha256, call.caller.owner)
    return answer({"url": url, "expires_at": rfc3339(ends), "exists": there})


async def begin_download(call: ApiCall) -> Response:
    wanted = await body(call.request, Download)
    url, ends = await call.parts.bundles.download_url(
        call.request.path_params["sha256"], call.caller, wanted.minutes, call.base_url
    )
    return answer({"url": url, "expires_at": rfc3339(ends)})


async def get_trace(call: ApiCall) -> Response:
    return answer(await call.parts.traces.chain(call.request.path_params["id"], call.caller))


class SignedBundles:
    """The holder of the signed URL may; no key is asked for."""

    def __init__(self, parts: PlaneParts) -> None:
        self._bundles, self._projects = parts.bundles, parts.projects

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/bundles/{signed}", self._receive, methods=["PUT"]),
            Route("/bundles/{signed}", self._send, methods=["GET"]),
            Route("/projects/{signed}", self._receive_project, methods=["PUT"]),
        ]

    async def _receive(self, request: Request) -> Response:
        try:
            new = await self._bundles.receive(request.path_params["signed"], request.stream())
        except Error as error:
            return refusal(error)
        return answer({"new": new}, 201 if new else 200)

    async def _receive_project(self, request: Request) -> Response:
        try:
            files = await self._projects.receive(request.path_params["signed"], request.stream())
        except Error as error:
            return refusal(error)
        return answer({"sha256": files.sha256}, 201)

    async def _send(self, request: Request) -> Response:
        try:
            data = await self._bundles.send(request.path_params["signed"])
        except Error as error:
            return refusal(error)
        return Response(data, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"})
