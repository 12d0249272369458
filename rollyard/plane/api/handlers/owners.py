"""Requests about engines, pools, owners, keys and the sweep."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from rollyard.net.metrics import write_metrics
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.http.wire import answer, body
from rollyard.plane.service.access import NewKey, owner_for
from rollyard.plane.service.metrics import plane_metrics
from rollyard.plane.service.owner_terms import OwnerTerms, set_owner_terms
from rollyard.plane.service.pools import PutPool
from rollyard.plane.service.shapes import key_json, pool_json


async def get_metrics(call: ApiCall) -> Response:
    pools = {pool.name: (pool.size, live) for pool, live in await call.parts.pools.page()}
    text = write_metrics(plane_metrics(call.parts.counters, await call.parts.store.counts(), pools))
    return Response(text, media_type="text/plain; version=0.0.4")


async def list_engines(call: ApiCall) -> Response:
    return answer({name: engine.capabilities for name, engine in call.parts.instances.engines.items()})


async def list_pools(call: ApiCall) -> Response:
    return answer({"items": [pool_json(pool, live) for pool, live in await call.parts.pools.page()]})


async def put_pool(call: ApiCall) -> Response:
    pool = await call.parts.pools.put(call.request.path_params["name"], await body(call.request, PutPool))
    return answer(pool_json(pool, None))


async def remove_pool(call: ApiCall) -> Response:
    await call.parts.pools.remove(call.request.path_params["name"])
    return Response(status_code=204)


async def get_usage(call: ApiCall) -> Response:
    usage = await call.parts.store.usage(owner_for(call.caller, call.request.query_params.get("owner")))
    default = call.parts.instances.settings.terms.quota
    return answer({**msgspec.to_builtins(usage), "limit": default if usage.quota is None else usage.quota})


async def set_terms(call: ApiCall) -> Response:
    terms = await body(call.request, OwnerTerms)
    return answer(await set_owner_terms(call.parts.store, call.request.path_params["owner"], terms))


async def create_key(call: ApiCall) -> Response:
    key, text = await call.parts.access.issue(await body(call.request, NewKey))
    return answer({**key_json(key), "key": text}, 201)


async def list_keys(call: ApiCall) -> Response:
    return answer({"items": [key_json(key) for key in await call.parts.store.list_keys()]})


async def revoke_key(call: ApiCall) -> Response:
    await call.parts.access.revoke(call.request.path_params["id"])
    return Response(status_code=204)


async def sweep_now(call: ApiCall) -> Response:
    return answer(await call.parts.sweeper.once())
