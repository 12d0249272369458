"""Requests that wait: changes by long poll and as a stream."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import ApiKey
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.http.wire import answer
from rollyard.plane.service.access import owner_for
from rollyard.plane.service.shapes import instance_json
from rollyard.plane.service.watch import Watcher, events

MAX_WAIT_S = 60.0
_FIRST = 500


async def list_changes(call: ApiCall) -> Response:
    cursor, wait_s = call.request.query_params.get("cursor"), read_wait(call.request)
    watcher = Watcher(call.parts.store, choose_owner(call.request, call.caller), cursor, call.parts.clock())
    found = await watcher.wait(wait_s, call.parts.drain.stopping) if cursor else []
    return answer({"items": [instance_json(one) for one in found], "next": watcher.cursor})


async def stream_changes(call: ApiCall) -> Response:
    cursor = call.request.headers.get("last-event-id") or call.request.query_params.get("cursor")
    owner = choose_owner(call.request, call.caller)
    watcher = Watcher(call.parts.store, owner, cursor, call.parts.clock())
    first = [] if cursor else (await call.parts.instances.page(owner=owner, limit=_FIRST))[0]
    watcher.note(first)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    lines = events(watcher, first, call.parts.drain.stopping)
    return StreamingResponse(lines, media_type="text/event-stream", headers=headers)


def choose_owner(request: Request, caller: ApiKey) -> str | None:
    """Whose instances: an admin may name any owner or none, others see their own."""
    owner = request.query_params.get("owner")
    return owner if caller.role == "admin" else owner_for(caller, owner)


def read_wait(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise PlaneInvalid(f"wait_s is from 0 to {MAX_WAIT_S:.0f} seconds")
    return seconds
