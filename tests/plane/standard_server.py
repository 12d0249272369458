"""A sandbox service of somebody else's, serving AEnvironment's contract for backends; instances live at 127.0.0.1."""

import itertools

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route


def answer(data, status=200):
    return JSONResponse({"success": status < 400, "code": status, "message": "", "data": data}, status)


class StandardService:
    def __init__(self, *, labels=True):
        self.instances, self.asked, self.labels = {}, [], labels
        self._next = itertools.count(1)

    def app(self):
        place = "/aenvironment/instance"
        return Starlette(
            routes=[
                Route(place, self.create, methods=["POST"]),
                Route(place, self.list, methods=["GET"]),
                Route(place + "/{id}", self.get, methods=["GET"]),
                Route(place + "/{id}", self.delete, methods=["DELETE"]),
                Route("/inside", self.inside),
            ]
        )

    async def create(self, request):
        body = await request.json()
        self.asked.append(body)
        found = {
            "id": f"box-{next(self._next)}",
            "status": "Creating",
            "ip": "127.0.0.1",
            "env": {"name": body["name"]},
        }
        if self.labels:
            found["labels"] = body["deploy_config"]["labels"]
        self.instances[found["id"]] = found
        return answer(found, 201)

    async def list(self, request):
        return answer(list(self.instances.values()))

    async def get(self, request):
        found = self.instances.get(request.path_params["id"])
        if found is None:
            return answer(None, 404)
        found["status"] = "Running"
        return answer(found)

    async def delete(self, request):
        gone = self.instances.pop(request.path_params["id"], None)
        return answer(True) if gone else answer(None, 404)

    async def inside(self, request):
        """What a client finds at the port of an instance, which is the service's own here."""
        return PlainTextResponse("inside")
