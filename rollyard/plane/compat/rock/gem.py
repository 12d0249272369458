"""`rock.make(env_id)`: an environment of the hub, played through the functions `reset` and `step` of its own server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import EnvError, PlaneUnavailable, SandboxError, SandboxGone
from rollyard.core.plane import ApiKey
from rollyard.plane.compat.rock.callers import RockCallers
from rollyard.plane.gateway.gateway import Gateway
from rollyard.plane.gateway.instance_http import ask
from rollyard.plane.http.wire import body
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.instances import Instances

_READY_S = 60.0
_STEP_S = 290.0  # its client waits 300
_LOOK_S = 0.1


class _Make(msgspec.Struct, frozen=True, kw_only=True):
    env_id: str


class _Move(msgspec.Struct, frozen=True, kw_only=True):
    sandbox_id: str
    seed: int | None = None
    action: Any = None


class Gem:
    def __init__(self, instances: Instances, gateway: Gateway, callers: RockCallers) -> None:
        self._instances, self._gateway, self._callers = instances, gateway, callers

    def routes(self) -> list[Route]:
        def at(name: str, endpoint: Any) -> Route:
            return Route(f"/apis/v1/envs/gem/{name}", self._callers.without_envelope(endpoint), methods=["POST"])

        return [at("make", self.make), at("reset", self.reset), at("step", self.step), at("close", self.close)]

    async def make(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted = await body(request, _Make)
        made = await self._instances.create(CreateInstance(env=wanted.env_id), owner=caller.owner, caller=caller.id)
        try:
            async with asyncio.timeout(_READY_S):
                while True:
                    if await self._healthy(made.id):
                        return {"sandbox_id": made.id}
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            await self._instances.delete(made.id, reason="its server did not come up")
            raise PlaneUnavailable(f"{wanted.env_id} did not come up within {_READY_S:g} s") from error

    async def _healthy(self, instance_id: str) -> bool:
        try:
            return (await ask(self._gateway, instance_id, "GET", "/health")).status == 200
        except SandboxGone:
            raise
        except (PlaneUnavailable, SandboxError, OSError):  # nothing listens yet
            return False

    async def reset(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted = await body(request, _Move)
        found = await self._call(
            caller, wanted.sandbox_id, "reset", {} if wanted.seed is None else {"seed": wanted.seed}
        )
        return {"observation": found.get("observation"), "info": found.get("info", {})}

    async def step(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted = await body(request, _Move)
        found = await self._call(caller, wanted.sandbox_id, "step", {"action": wanted.action})
        if missing := {"observation", "reward", "terminated", "truncated"} - set(found):
            raise EnvError(f"the environment's step has no {', '.join(sorted(missing))}")
        return {"info": {}, **found}

    async def close(self, request: Request, caller: ApiKey) -> dict[str, Any]:
        wanted = await body(request, _Move)
        own = await self._callers.find_own(caller, wanted.sandbox_id)
        await self._instances.delete(own.id)
        return {"sandbox_id": own.id}

    async def _call(self, caller: ApiKey, sandbox_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        own = await self._callers.find_own(caller, sandbox_id)
        async with asyncio.timeout(_STEP_S):
            said = await ask(self._gateway, own.id, "POST", f"/functions/{name}", msgspec.json.encode(arguments))
        try:
            answer = msgspec.json.decode(said.body, type=dict[str, Any])
        except (*BAD_JSON, ValueError) as error:
            raise EnvError(f"the environment answered {name} with no JSON object (status {said.status})") from error
        if said.status != 200 or not answer.get("success", True):
            raise EnvError(str(answer.get("error") or f"{name} failed with status {said.status}"))
        found = answer.get("data", answer)
        if not isinstance(found, dict):
            raise EnvError(f"the environment's {name} gave no object")
        return found
