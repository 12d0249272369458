"""The data port: MCP, functions, reward and health of the instance that a request's headers name.

Where a request goes comes from the instance's record. A health question about an instance that is still coming up is held open
until it is healthy, so polling costs nothing: its client gives up on three silent seconds, not on three seconds, and spaces
before a JSON body harm nothing. What is said in the end is the instance's own answer, never one made up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, PlaneUnavailable
from rollyard.core.log import Log
from rollyard.plane.compat.aenv.callers import INSTANCE_HEADER, URL_HEADER, AenvCallers
from rollyard.plane.compat.aenv.envelope import failure
from rollyard.plane.engines.protocol import START_JOB
from rollyard.plane.gateway.gateway import Gateway
from rollyard.plane.gateway.instance_http import ask
from rollyard.plane.service.instances import Instances

_log = Log("rollyard.plane")
_QUIET_S = 1.5  # after this a space is sent now and then
_YOUNG_S = 60.0  # how long after its creation an instance may still be coming up
_PROBE_S = 10.0
_OURS = (INSTANCE_HEADER.encode(), URL_HEADER.encode())


class DataPort:
    def __init__(self, instances: Instances, gateway: Gateway, callers: AenvCallers) -> None:
        self._instances, self._gateway, self._callers = instances, gateway, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        except (Error, OSError, TimeoutError) as error:
            if started:  # the connection ends in the middle, so that a part is not taken for the whole
                _log.warning("an answer broke off", kind=type(error).__name__)
                return
            shown = error if isinstance(error, Error) else PlaneUnavailable("the instance did not answer")
            await failure(shown)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, asks_health = Headers(scope=scope), scope["path"] == "/health" and scope["method"] == "GET"
        instance_id = headers.get(INSTANCE_HEADER, "")
        if not instance_id and asks_health:
            gateway = {"status": "healthy", "message": "the gateway runs; name an instance to ask about it"}
            await JSONResponse(gateway)(scope, receive, send)
            return
        if not instance_id:
            instance_id = await self._callers.only_instance(scope, self._instances)
        else:
            self._callers.admit(instance_id, headers.get(URL_HEADER, ""))
        if asks_health and await self._is_starting(instance_id):
            await (await self._health(instance_id))(scope, receive, send)
            return
        kept = [(name, value) for name, value in scope["headers"] if name not in _OURS]
        await self._gateway.forward({**scope, "headers": kept}, receive, send, instance_id)

    # health of a young instance

    async def _is_starting(self, instance_id: str) -> bool:
        instance, engine = await self._instances.running(instance_id)
        return engine.capabilities.dial and self._instances.clock() - instance.created_at < _YOUNG_S

    async def _health(self, instance_id: str) -> Response:
        asking = asyncio.create_task(self._until_healthy(instance_id))
        done, _ = await asyncio.wait([asking], timeout=_QUIET_S)
        if done:
            return asking.result()
        return StreamingResponse(_keep_alive(asking), media_type="application/json")

    async def _until_healthy(self, instance_id: str) -> Response:
        """Its own good answer; the last one it gave, or why there is none, when its time to come up is over."""
        pause, last = 0.05, failure(PlaneUnavailable("the environment's server does not listen yet"))
        while await self._is_starting(instance_id):
            try:
                async with asyncio.timeout(_PROBE_S):
                    last = await self._probe(instance_id)
                if _healthy(last):
                    return last
            except (Error, OSError, TimeoutError) as error:
                last = failure(error if isinstance(error, Error) else PlaneUnavailable("its server did not answer"))
                if ending := await self._ending(instance_id):
                    return failure(PlaneUnavailable(ending))
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return last

    async def _probe(self, instance_id: str) -> Response:
        said = await ask(self._gateway, instance_id, "GET", "/health")
        return Response(said.body, said.status, media_type="application/json")

    async def _ending(self, instance_id: str) -> str | None:
        """How the environment's own program ended, after which nothing comes up any more; None while it runs."""
        instance, engine = await self._instances.running(instance_id)
        if not engine.capabilities.exec or not instance.plan.start:
            return None
        job = await (await self._instances.sandbox(instance_id)).job(START_JOB)
        code = await job.poll()
        if code is None:
            return None
        said = (await job.tail(400, stderr=True)).decode("utf-8", "replace").strip()
        return f"the environment's program ended with code {code}: {said}"


async def _keep_alive(asking: asyncio.Task[Response]) -> AsyncIterator[bytes]:
    try:
        while not (await asyncio.wait([asking], timeout=_QUIET_S))[0]:
            yield b" "
        try:
            yield bytes(asking.result().body)
        except (Error, OSError, TimeoutError) as error:
            shown = error if isinstance(error, Error) else PlaneUnavailable("the instance did not answer")
            yield bytes(failure(shown).body)
    finally:
        asking.cancel()


def _healthy(response: Response) -> bool:
    try:
        said = msgspec.json.decode(bytes(response.body))
    except BAD_JSON:
        return False
    found = said.get("data") if isinstance(said, dict) and isinstance(said.get("data"), dict) else said
    return response.status_code == 200 and isinstance(found, dict) and found.get("status") in ("success", "healthy")
