"""A loopback stand-in for Arca, written from its contract: the OpenAPI half answers `code` as an int, the gateway half as ""."""

import itertools

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

KEY = "arca-secret"


class ArcaStandIn:
    def __init__(self, *, pending=1, status="RUNNING"):
        self.sandboxes, self.asked, self.tokens = {}, [], {}
        self.pending, self.status = pending, status
        self._next = itertools.count(1)

    def app(self):
        place = "/arca/openapi/v1/sandbox/instances"
        return Starlette(
            routes=[
                Route(place, self.create, methods=["POST"]),
                Route(place + "/{id}", self.get, methods=["GET"]),
                Route(place + "/{id}", self.delete, methods=["DELETE"]),
                Route("/arca/api/v1/sandbox/{id}/presign/token", self.presign, methods=["POST"]),
                Route("/arca/api/v1/session/{token}", self.session, methods=["GET"]),
            ]
        )

    def _refused(self, request):
        if request.headers.get("x-agent-sandbox-api-key") != KEY:
            return JSONResponse({"success": False, "code": 401, "message": "bad key", "data": None}, 401)
        if "id" in request.path_params:
            assert request.headers["x-agent-sandbox-id"] == request.path_params["id"]
            if request.path_params["id"] not in self.sandboxes:
                return JSONResponse({"success": False, "code": 404, "message": "not found", "data": None}, 404)
        return None

    async def create(self, request):
        if refused := self._refused(request):
            return refused
        body = await request.json()
        assert request.headers["x-agent-sandbox-template-id"] == body["template_id"]
        self.asked.append(body)
        name = f"sb-{next(self._next)}"
        self.sandboxes[name] = self.pending
        return JSONResponse({"success": True, "code": 200, "message": "success", "data": {"sandbox_id": name}})

    async def get(self, request):
        if refused := self._refused(request):
            return refused
        name = request.path_params["id"]
        waiting, self.sandboxes[name] = self.sandboxes[name], self.sandboxes[name] - 1
        status = "PENDING" if waiting > 0 else self.status
        return JSONResponse({"success": True, "code": 200, "data": {"sandbox_id": name, "status": status}})

    async def delete(self, request):
        if refused := self._refused(request):
            return refused
        del self.sandboxes[request.path_params["id"]]
        return JSONResponse({"success": True, "code": 200, "data": 1})

    async def presign(self, request):
        if refused := self._refused(request):
            return refused
        minutes = (await request.json())["expiration_time"]
        token = f"t{len(self.tokens)}"
        self.tokens[token] = (request.path_params["id"], int(request.headers["x-agent-sandbox-port"]), minutes)
        return JSONResponse({"success": True, "code": "", "message": "", "data": {"token": token}})

    async def session(self, request):
        return PlainTextResponse("port {1} of {0}".format(*self.tokens[request.path_params["token"]]))
