"""`black_box`: bytes to the policy and back as they come. That a call happened is recorded before the first one leaves."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

from rollyard.core.protocols import Passthrough, RawRequest, RawResponse
from rollyard.gate.keys import key_of
from rollyard.gate.refusals import refusal_of
from rollyard.net.http_server import Exchange
from rollyard.wire import CODECS, Route
from rollyard.wire.codec import Codec

if TYPE_CHECKING:
    from rollyard.gate.calls import Calls
    from rollyard.gate.session import Session

_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "upgrade",
        "trailer",
        "te",
        "proxy-authenticate",
    )
)
_UNSAFE = re.compile(r"[\r\n\0]")


async def relay(
    calls: Calls,
    session: Session,
    through: Passthrough,
    route: Route,
    exchange: Exchange,
    path: str,
    limit_s: float,
) -> None:
    """`path` is a dialect's own, written by us; the rollout's key stays here, wherever in the request it stands."""
    codec = CODECS[route.dialect]
    own = key_of(exchange.headers, exchange.query).encode("latin-1")

    def clean(data: bytes) -> bytes:
        return data.replace(own, b"[key]")

    request = RawRequest(
        rollout_id=session.rollout_id,
        method=exchange.method,
        path=path + ("?" + clean(exchange.query).decode("latin-1") if exchange.query else ""),
        headers={k.decode("latin-1"): clean(v).decode("latin-1") for k, v in exchange.headers.items()},
        body=clean(exchange.body),
    )
    task = asyncio.current_task()
    exchange.left = task.cancel if task is not None else None
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await calls.turnstile.enter(session.lane)
            try:
                if not await calls.stopped(session, route, exchange):
                    await calls.happened(session, route, time.time())
                    await _copy(await through.relay(request), exchange)
            finally:
                calls.turnstile.leave(session.lane)
    except asyncio.CancelledError:  # the reader left or the rollout closed: there is nobody to tell
        exchange.abort()
        raise
    except Exception as error:  # noqa: BLE001 - every failure here is an answer; it is logged by refusal_of
        _refuse(error, codec, session, exchange)
    session.last_activity = time.monotonic()
    session.note(f"relayed {exchange.method} {path} -> {exchange.status} in {session.last_activity - started:.3f} s")


async def _copy(response: RawResponse, exchange: Exchange) -> None:
    lines: list[str] = []
    for name, value in response.headers.items():
        if name.lower() not in _HOP and not _UNSAFE.search(name + value):
            lines.append(f"{name}: {value}\r\n")
    exchange.start(response.status, kind=None, extra="".join(lines).encode("latin-1", "replace"))
    try:
        async for chunk in response.body:
            exchange.send(chunk)
            await exchange.drained()
    finally:
        close = getattr(response.body, "aclose", None)
        if close is not None:
            await close()
    exchange.finish()


def _refuse(error: Exception, codec: Codec, session: Session, exchange: Exchange) -> None:
    refusal = refusal_of(error, codec.name, rollout_id=session.rollout_id, call_id="relayed")
    if exchange.head_sent:
        exchange.abort()  # the agent must see that the body is cut, not take it for the whole
    else:
        body = codec.error(refusal.status, refusal.code, refusal.text)
        exchange.respond(refusal.status, body, extra=refusal.headers())
