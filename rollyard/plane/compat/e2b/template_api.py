"""Templates and snapshots over REST: request a build, upload its files, start and watch it; names, tags, lists and removals.

Shapes are those of the vendor's `spec/openapi.yml`: `TemplateBuildRequestV3`, `TemplateBuildStartV2`, `TemplateBuildInfo`,
`Template`, `SnapshotInfo`, `TemplateTag`. A file's upload URL is signed, as it is at the vendor's: no key comes with it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.plane import ApiKey
from rollyard.plane.compat.e2b.boxes import ENVD_VERSION, show_time
from rollyard.plane.compat.e2b.errors import E2bRefusal, rest
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.compat.e2b.requests import Endpoint, guard, one_page, read_json
from rollyard.plane.compat.e2b.template_builds import TemplateBuilder, read_resources
from rollyard.plane.compat.e2b.templates import BASE, Template, TemplateBuild, read_tags

_LINES = 100
_UPLOAD_S = 3600
_REQUEST = {"name", "alias", "tags", "cpuCount", "memoryMB", "teamID"}


class TemplateApi:
    def __init__(self, boxes: InstanceBoxes) -> None:
        self._boxes, self._templates = boxes, boxes.templates
        self._builder = TemplateBuilder(boxes)

    def routes(self) -> list[Route]:
        def at(path: str, endpoint: Endpoint, method: str) -> Route:
            return Route(path, guard(self._boxes, endpoint), methods=[method])

        one = "/templates/{id:path}"
        return [
            at("/v3/templates", self.request_build, "POST"),
            at("/templates", self.list, "GET"),
            at("/v2/templates", self.list, "GET"),
            at("/snapshots", self.list_snapshots, "GET"),
            at("/templates/tags", self.assign_tags, "POST"),
            at("/templates/tags", self.remove_tags, "DELETE"),
            at("/templates/aliases/{id:path}", self.by_alias, "GET"),
            at(f"{one}/tags", self.tags, "GET"),
            at(f"{one}/files/{{hash}}", self.upload_link, "GET"),
            Route(f"{one}/files/{{hash}}", self.upload, methods=["PUT"]),
            at(f"/v2{one}/builds/{{build}}", self.start_build, "POST"),
            at(f"{one}/builds/{{build}}/status", self.build_status, "GET"),
            at(one, self.delete, "DELETE"),
            at(one, self.get, "GET"),
        ]

    async def request_build(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        for name in fields:
            if name not in _REQUEST and fields[name]:
                raise E2bRefusal("unimplemented", f"{name} is not served here", 400)
        text, tags = fields.get("name") or fields.get("alias"), fields.get("tags") or []
        if not isinstance(text, str):
            raise E2bRefusal("invalid_argument", "name is required")
        given = read_tags(tags, text.partition(":")[0]) if tags else []
        template, build = await self._templates.begin(caller.owner, text, given, read_resources(fields))
        pointing = [tag for tag, build_id in template.tags.items() if build_id == build.id]
        body = {
            "templateID": template.id,
            "buildID": build.id,
            "public": False,
            "names": [template.name],
            "aliases": [template.name],
            "tags": pointing,
        }
        return JSONResponse(body, 202)

    async def upload_link(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        digest = request.path_params["hash"]
        present = await self._templates.has_archive(caller.owner, digest)
        until = str(int(time.time()) + _UPLOAD_S)
        place = f"{str(request.base_url).rstrip('/')}/templates/{template.id}/files/{digest}"
        signature = self._signature(template.id, caller.owner, digest, until)
        query = urlencode({"owner": caller.owner, "until": until, "signature": signature})
        return JSONResponse({"present": present, "url": f"{place}?{query}"}, 201)

    def _signature(self, template_id: str, owner: str, digest: str, until: str) -> str:
        token = self._boxes.tokens.of(f"files {template_id} {owner!r} {digest} {until}")
        return hashlib.sha256(token.encode()).hexdigest()

    async def upload(self, request: Request) -> Response:
        """One archive, whole or not at all."""
        try:
            digest, query = request.path_params["hash"], request.query_params
            owner, until, given = query.get("owner", ""), query.get("until", ""), query.get("signature", "")
            wanted = self._signature(request.path_params["id"], owner, digest, until)
            if not hmac.compare_digest(given.encode(), wanted.encode()) or int(until) < time.time():
                raise E2bRefusal("unauthenticated", "this upload URL is not signed by this server, or has expired")
            await self._templates.take_archive(owner, digest, request.stream())
        except ClientDisconnect:
            return Response(status_code=400)
        except E2bRefusal as error:
            return rest(error)
        return Response(status_code=200)

    async def start_build(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        kept = await self._templates.build(template, request.path_params["build"])
        if kept is None:
            raise E2bRefusal("not_found", "no such build")
        await self._builder.start(caller, kept, await read_json(request))
        return Response(status_code=202)

    async def build_status(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        build = await self._builder.watch(template, request.path_params["build"])
        if build is None:
            raise E2bRefusal("not_found", "no such build")
        offset = request.query_params.get("logsOffset") or "0"
        lines = build.lines[int(offset) :][:_LINES] if offset.isdigit() else []
        shown = [
            {"timestamp": show_time(line.at), "level": line.level, "message": line.message}
            | ({"step": line.step} if line.step else {})
            for line in lines
        ]
        body: dict[str, Any] = {
            "templateID": template.id,
            "buildID": build.id,
            "status": build.state,
            "logs": [],
            "logEntries": shown,
        }
        if build.state == "error":
            step = {"step": build.failed_step} if build.failed_step else {}
            body["reason"] = {"message": build.error, "logEntries": [], **step}
        return JSONResponse(body)

    async def list(self, request: Request, caller: ApiKey) -> Response:
        found = [one for one in await self._templates.all(caller.owner) if not one.sandbox]
        shown = [_show(one, await self._templates.builds_of(one)) for one in found]
        return one_page(request, shown, "templateID")

    async def list_snapshots(self, request: Request, caller: ApiKey) -> Response:
        query = request.query_params
        found = [one for one in await self._templates.all(caller.owner) if one.sandbox]
        if query.get("sandboxID"):
            found = [one for one in found if one.sandbox == query["sandboxID"]]
        if query.get("name"):
            named = await self._templates.find(caller.owner, query["name"])
            found = [one for one in found if named is not None and one.id == named[0].id]
        return one_page(request, [show_snapshot(one, tag) for one in found for tag in one.tags], "snapshotID")

    async def get(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        kept = await self._templates.builds_of(template)
        shown = _show(template, kept)
        builds = [
            {"buildID": build.id, "status": build.state, "createdAt": show_time(build.created_at)}
            | {"updatedAt": show_time(build.created_at), "cpuCount": shown["cpuCount"], "memoryMB": shown["memoryMB"]}
            for build in kept
        ]
        return JSONResponse({**shown, "builds": builds})

    async def by_alias(self, request: Request, caller: ApiKey) -> Response:
        if request.path_params["id"] == BASE:
            return JSONResponse({"templateID": BASE, "public": True})
        template, tag = await self._find_own(request, caller)
        kept = await self._templates.build(template, template.tags.get(tag, ""))
        if kept is None or kept.value.state != "ready":
            raise E2bRefusal("not_found", f"there is no build of {request.path_params['id']} that is ready")
        return JSONResponse({"templateID": template.id, "public": False})

    async def delete(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        for image in await self._templates.remove(template):
            await self._boxes.forget_image(image)
        return Response(status_code=204)

    async def tags(self, request: Request, caller: ApiKey) -> Response:
        template, _ = await self._find_own(request, caller)
        shown = [
            {"tag": tag, "buildID": build_id, "createdAt": show_time(template.tagged_at[tag])}
            for tag, build_id in template.tags.items()
        ]
        return JSONResponse(shown)

    async def assign_tags(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        target = str(fields.get("target") or "")
        found = await self._templates.find(caller.owner, target)
        build_id = found[0].tags.get(found[1]) if found is not None else None
        if found is None or build_id is None:
            raise E2bRefusal("not_found", f"there is no template {target}")
        template = found[0]
        tags = read_tags(fields.get("tags"), template.name)
        await self._templates.point(template, tags, build_id)
        return JSONResponse({"tags": tags, "buildID": build_id}, 201)

    async def remove_tags(self, request: Request, caller: ApiKey) -> Response:
        fields = await read_json(request)
        found = await self._templates.find(caller.owner, str(fields.get("name") or ""))
        if found is None:
            raise E2bRefusal("not_found", f"there is no template {fields.get('name')}")
        template = found[0]
        await self._templates.unpoint(template, read_tags(fields.get("tags"), template.name))
        return Response(status_code=204)

    async def _find_own(self, request: Request, caller: ApiKey) -> tuple[Template, str]:
        found = await self._templates.find(caller.owner, request.path_params["id"])
        if found is None:
            raise E2bRefusal("not_found", f"there is no template {request.path_params['id']}")
        return found


def show_snapshot(template: Template, tag: str) -> dict[str, Any]:
    return {"snapshotID": template.full_name(tag), "names": [template.full_name(tag)] if template.name else []}


def _show(template: Template, builds: Sequence[TemplateBuild]) -> dict[str, Any]:
    newest = builds[-1]
    return {
        "templateID": template.id,
        "buildID": newest.id,
        **_show_size(newest),
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": show_time(template.created_at),
        "updatedAt": show_time(newest.created_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": newest.state,
    }


def _show_size(build: TemplateBuild) -> Mapping[str, int]:
    """Limits that were not asked for are shown as 1 CPU and 0: the engine's own."""
    fields = build.resources
    return {"cpuCount": round(fields.cpus or 1), "memoryMB": fields.memory_mb or 0, "diskSizeMB": fields.disk_mb or 0}
