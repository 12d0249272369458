"""The control half: create, find, list, extend, pause, copy and end sandboxes over REST.

Shapes are those of the vendor's `spec/openapi.yml`: `NewSandbox`, `Sandbox`, `SandboxDetail`, `ListedSandbox`, `SnapshotInfo`.
Whatever else that document has is answered 501 in the shape of its `Error`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import Error, SandboxGone
from rollyard.core.plane import ApiKey
from rollyard.plane.compat.e2b.boxes import (
    MOST_FORKS,
    E2bSandbox,
    SandboxView,
    check_egress,
    describe,
    show_made,
)
from rollyard.plane.compat.e2b.errors import E2bRefusal, explain
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.compat.e2b.metrics import UsageReading, read_interval, show_metric
from rollyard.plane.compat.e2b.requests import Endpoint, guard, one_page, read_json, refuse
from rollyard.plane.compat.e2b.template_api import show_snapshot
from rollyard.plane.compat.e2b.templates import TemplateBuild

_GRAIN_S = 0.001  # what a time loses on its way to a client and back
_MOST_MEASURED = 100
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_REFUSED = ("sandboxes", "v2/sandboxes", "templates", "v2/templates", "v3/templates", "volumes", "snapshots", "secrets")


class E2bControl:
    def __init__(self, boxes: InstanceBoxes) -> None:
        self._boxes = boxes

    def routes(self) -> list[Route]:
        def both(path: str, endpoint: Endpoint, method: str) -> list[Route]:
            guarded = guard(self._boxes, endpoint)
            return [Route(f"{version}{path}", guarded, methods=[method]) for version in ("", "/v2")]

        return [
            *both("/sandboxes", self.create, "POST"),
            *both("/sandboxes", self.list, "GET"),
            *both("/sandboxes/metrics", self.metrics_of_many, "GET"),
            *both("/sandboxes/{id}/metrics", self.metrics, "GET"),
            *both("/sandboxes/{id}", self.get, "GET"),
            *both("/sandboxes/{id}", self.delete, "DELETE"),
            *both("/sandboxes/{id}/connect", self.connect, "POST"),
            *both("/sandboxes/{id}/resume", self.connect, "POST"),
            *both("/sandboxes/{id}/timeout", self.timeout, "POST"),
            *both("/sandboxes/{id}/refreshes", self.refresh, "POST"),
            *both("/sandboxes/{id}/network", self.set_network, "PUT"),
            *both("/sandboxes/{id}/pause", self.pause, "POST"),
            *both("/sandboxes/{id}/snapshots", self.snapshot, "POST"),
            *both("/sandboxes/{id}/fork", self.fork, "POST"),
        ]

    def refusals(self) -> list[Route]:
        """Whatever is below the vendor's paths and is not served; it goes after all that is."""
        answer = guard(self._boxes, refuse)
        return [
            Route(f"/{place}{rest}", answer, methods=_METHODS) for place in _REFUSED for rest in ("", "/{rest:path}")
        ]

    async def create(self, request: Request, caller: ApiKey) -> Response:
        box = await self._boxes.create(caller, await read_json(request), request.headers.get("idempotency-key"))
        return JSONResponse(show_made(box, self._boxes.tokens), 201)

    async def connect(self, request: Request, caller: ApiKey) -> Response:
        """A running one again, whose time is made longer, never shorter; a paused one woken, for as long as was asked."""
        fields = await read_json(request)
        seen = await self._boxes.view(caller, request.path_params["id"])
        if seen.state == "paused":
            await self._boxes.resume(caller, seen.id)
        box = await self._boxes.find(seen.id)
        if fields.get("timeout") and box.sandbox.capabilities.extend:
            seconds = _seconds(fields["timeout"])
            ends_before = seen.expires_at is None or seen.expires_at < self._boxes.clock() + seconds
            if ends_before or seen.state == "paused":
                await self._boxes.extend(caller, seen.id, seconds)
        return JSONResponse(show_made(box, self._boxes.tokens), 201 if seen.state == "paused" else 200)

    async def get(self, request: Request, caller: ApiKey) -> Response:
        return JSONResponse(describe(await self._boxes.view(caller, request.path_params["id"])))

    async def list(self, request: Request, caller: ApiKey) -> Response:
        query = request.query_params
        wanted = parse_qs(query.get("metadata", ""), keep_blank_values=True)
        metadata = {unquote(name): unquote(values[-1]) for name, values in wanted.items()}
        states = {state for part in query.getlist("state") for state in part.split(",") if state}
        found = [
            describe(seen)
            for seen in await self._boxes.list(caller, metadata)
            if _is_young_enough(request, seen.created_at)
        ]
        if states:
            found = [one for one in found if one["state"] in states]
        if query.get("template"):
            found = [one for one in found if query["template"] in (one["templateID"], one["alias"])]
        if query.get("order") == "asc":
            found.reverse()
        return one_page(request, found, "sandboxID")

    async def metrics(self, request: Request, caller: ApiKey) -> Response:
        start, end = read_interval(request)
        seen = await self._boxes.view(caller, request.path_params["id"])
        found = await self._measure(seen)
        return JSONResponse([show_metric(one, seen.resources) for one in found if start <= one.at < end])

    async def _measure(self, seen: SandboxView) -> list[UsageReading]:
        """A paused one uses nothing that could be told."""
        if seen.state == "paused":
            return []
        return await (await self._boxes.find(seen.id)).usage.read(seen.created_at)

    async def metrics_of_many(self, request: Request, caller: ApiKey) -> Response:
        """The last reading of each; those that are gone are left out."""
        ids = [one for part in request.query_params.getlist("sandbox_ids") for one in part.split(",") if one]
        if not 1 <= len(ids) <= _MOST_MEASURED:
            raise E2bRefusal("invalid_argument", f"sandbox_ids are 1 to {_MOST_MEASURED} names")
        metrics: dict[str, Any] = {}
        for sandbox_id in dict.fromkeys(ids):
            with contextlib.suppress(SandboxGone):
                seen = await self._boxes.view(caller, sandbox_id)
                if found := await self._measure(seen):
                    metrics[sandbox_id] = show_metric(found[-1], seen.resources)
        return JSONResponse({"sandboxes": metrics})

    async def delete(self, request: Request, caller: ApiKey) -> Response:
        await self._boxes.kill(caller, request.path_params["id"])
        return Response(status_code=204)

    async def timeout(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        await self._boxes.extend(caller, request.path_params["id"], _seconds(fields.get("timeout")))
        return Response(status_code=204)

    async def refresh(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        await self._boxes.extend(caller, request.path_params["id"], _seconds(fields.get("duration") or 300))
        return Response(status_code=204)

    async def set_network(self, request: Request, caller: ApiKey) -> Response:
        """Other hosts for a sandbox that was made with a list of them; what is left out is cleared."""
        fields = await read_json(request)
        box = await self._boxes.find((await self._boxes.view(caller, request.path_params["id"])).id)
        refused = [
            name for name in fields if name not in ("allowOut", "denyOut", "allow_internet_access") and fields[name]
        ]
        refused += check_egress(fields)
        closed = bool(fields.get("denyOut")) or fields.get("allow_internet_access") is False
        if not closed:
            refused.append("a network that is open but for a list")
        if box.sandbox.egress is None:
            refused.append("another network for a sandbox that was created without allow_out, or before a restart,")
        if refused or box.sandbox.egress is None:
            raise E2bRefusal("unimplemented", f"{refused[0]} is not served here", 400)
        box.sandbox.egress.allow([str(host) for host in fields.get("allowOut") or ()])
        return Response(status_code=204)

    async def pause(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        seen = await self._boxes.view(caller, request.path_params["id"])
        if seen.state == "paused":
            raise E2bRefusal("already_exists", "the sandbox is paused already")
        await self._boxes.pause(caller, seen.id, memory=fields.get("memory") is not False)
        return Response(status_code=204)

    async def snapshot(self, request: Request, caller: ApiKey) -> Response:
        """The files are kept, and memory is not."""
        fields = await read_json(request)
        box = await self._boxes.find((await self._boxes.view(caller, request.path_params["id"])).id)
        origin = await self._boxes.templates.of_image(box.image)
        kept = TemplateBuild(
            id=str(uuid.uuid4()),
            template="",
            owner=caller.owner,
            created_at=time.time(),
            state="ready",
            image=await self._boxes.snapshot(caller, box.id),
        )
        if origin is not None:
            kept.env, kept.user, kept.workdir, kept.resources = (
                origin.env,
                origin.user,
                origin.workdir,
                origin.resources,
            )
        name = fields.get("name") or ""
        template, tag = await self._boxes.templates.add_snapshot(caller.owner, str(name), box.id, kept)
        return JSONResponse(show_snapshot(template, tag), 201)

    async def fork(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        count = fields.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_FORKS:
            raise E2bRefusal("invalid_argument", f"count is from 1 to {MOST_FORKS}")
        seconds = _seconds(fields.get("timeout") or 300)
        outcomes = await self._boxes.fork(caller, request.path_params["id"], seconds, count)
        return JSONResponse([self._outcome(one) for one in outcomes], 201)

    def _outcome(self, outcome: E2bSandbox | Error) -> dict[str, Any]:
        if isinstance(outcome, E2bSandbox):
            return {"sandbox": show_made(outcome, self._boxes.tokens)}
        refusal = explain(outcome)
        return {"error": {"code": refusal.status, "message": refusal.message}}


def _is_young_enough(request: Request, created_at: float) -> bool:
    """Whether a sandbox is as young as was asked."""
    text = request.query_params.get("startedAfter")
    try:
        return not text or created_at + _GRAIN_S >= datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError as error:
        raise E2bRefusal("invalid_argument", f"startedAfter {text!r} is not a time") from error


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or value < 0:
        raise E2bRefusal("invalid_argument", "timeout must be a number of seconds")
    return max(float(value), 1.0)
