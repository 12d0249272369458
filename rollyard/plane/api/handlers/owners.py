"""Requests about engines, pools, owners, keys and the sweep."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import ApiKey
from rollyard.net.metrics import write_metrics
from rollyard.plane.http.wire import answer, body
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import NewKey, owner_for
from rollyard.plane.service.metrics import plane_metrics
from rollyard.plane.service.pools import PutPool
from rollyard.plane.service.shapes import key_json, pool_json


class OwnerTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; null means the server's default. A rate is creations a second."""

    quota: int | msgspec.UnsetType | None = msgspec.UNSET
    rate: float | msgspec.UnsetType | None = msgspec.UNSET


class OwnerHandlers:
    def __init__(self, parts: PlaneParts) -> None:
        self._store, self._sweeper, self._pools = parts.store, parts.sweeper, parts.pools
        self._access, self._instances, self._counters = parts.access, parts.instances, parts.counters

    async def metrics(self, request: Request, caller: ApiKey) -> Response:
        pools = {pool.name: (pool.size, live) for pool, live in await self._pools.page()}
        text = write_metrics(plane_metrics(self._counters, await self._store.counts(), pools))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def engines(self, request: Request, caller: ApiKey) -> Response:
        return answer({name: engine.abilities for name, engine in self._instances.engines.items()})

    async def list_pools(self, request: Request, caller: ApiKey) -> Response:
        return answer({"items": [pool_json(pool, live) for pool, live in await self._pools.page()]})

    async def put_pool(self, request: Request, caller: ApiKey) -> Response:
        pool = await self._pools.put(request.path_params["name"], await body(request, PutPool))
        return answer(pool_json(pool, None))

    async def remove_pool(self, request: Request, caller: ApiKey) -> Response:
        await self._pools.remove(request.path_params["name"])
        return Response(status_code=204)

    async def usage(self, request: Request, caller: ApiKey) -> Response:
        usage = await self._store.usage(owner_for(caller, request.query_params.get("owner")))
        default = self._instances.settings.terms.quota
        return answer({**msgspec.to_builtins(usage), "limit": default if usage.quota is None else usage.quota})

    async def set_terms(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, OwnerTerms)
        terms = {k: v for k, v in msgspec.structs.asdict(asked).items() if v is not msgspec.UNSET}
        if not terms:
            raise PlaneInvalid("give a quota or a rate")
        if any(value is not None and not 0 <= value < 2**31 for value in terms.values()):
            raise PlaneInvalid("a quota and a rate are numbers from 0, or null for the server's default")
        return answer(await self._store.set_terms(request.path_params["owner"], **terms))

    async def create_key(self, request: Request, caller: ApiKey) -> Response:
        key, text = await self._access.issue(await body(request, NewKey))
        return answer({**key_json(key), "key": text}, 201)

    async def list_keys(self, request: Request, caller: ApiKey) -> Response:
        return answer({"items": [key_json(key) for key in await self._store.list_keys()]})

    async def revoke_key(self, request: Request, caller: ApiKey) -> Response:
        await self._access.revoke(request.path_params["id"])
        return Response(status_code=204)

    async def sweep(self, request: Request, caller: ApiKey) -> Response:
        return answer(await self._sweeper.once())
