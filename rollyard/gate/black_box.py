"""`black_box`: bytes to the policy and back as they come. That a call happened, and its status, is recorded before the first one
leaves."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import GateError, UpstreamError
from rollyard.core.ids import new_id
from rollyard.core.protocols import Passthrough, RawRequest, RawResponse
from rollyard.gate.answer_check import AnswerCheck
from rollyard.gate.keys import key_of
from rollyard.gate.refusals import refusal_of
from rollyard.gate.session import EXCUSED_WAIT_S, GAVE_UP, RefusedCall
from rollyard.net.exchange import Exchange
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
    one = Relay(calls, session, route, exchange)
    try:
        async with asyncio.timeout(limit_s):
            await calls.restore(session)
            await calls.fair_queue.enter(session.lane)
            try:
                session.refuse_server_tools(route.dialect, exchange.body)
                if not await calls.stop_if_spent(session, route, exchange):
                    await one.run(through, request)
            finally:
                calls.fair_queue.leave(session.lane)
    except asyncio.CancelledError:  # the reader left or the rollout closed: no reader is left to tell
        one.note_leaving()
        exchange.abort()
        raise
    except Exception as error:  # noqa: BLE001 - every failure here is an answer; it is logged by refusal_of
        await one.fail(error)
        _refuse(error, codec, session, exchange)
    finally:
        session.relays.pop(one.id, None)
    session.last_activity = time.monotonic()
    session.note(f"relayed {exchange.method} {path} -> {exchange.status} in {time.time() - one.began:.3f} s")


class Relay:
    """One call that passes through. Its status is committed before its first byte leaves; its end is reported to the session,
    by which the rollout says whose failure it was."""

    def __init__(self, calls: Calls, session: Session, route: Route, exchange: Exchange) -> None:
        self.id = new_id("call")
        self.began = time.time()
        self._calls, self._session, self._route, self._exchange = calls, session, route, exchange
        self._asks_model = route.endpoint == "generate"
        self._recorded = self._concluded = False
        self._seen: AnswerCheck | None = None

    async def run(self, through: Passthrough, request: RawRequest) -> None:
        session = self._session
        session.calls += 1
        session.last_activity = time.monotonic()
        session.relays[self.id] = self.began
        response = await through.relay(request)
        self._seen = AnswerCheck(response)
        try:
            await self._record(response.status)
            await self._copy(response, self._seen)
            self._conclude(self._seen)
        finally:
            close = getattr(response.body, "aclose", None)
            if close is not None:
                await close()

    async def _copy(self, response: RawResponse, seen: AnswerCheck) -> None:
        exchange, relays = self._exchange, self._session.relays
        lines: list[str] = []
        for name, value in response.headers.items():
            if name.lower() not in _HOP and not _UNSAFE.search(name + value):
                lines.append(f"{name}: {value}\r\n")
        exchange.start(response.status, kind=None, extra="".join(lines).encode("latin-1", "replace"))
        async for chunk in response.body:
            relays[self.id] = time.time()
            seen.feed(chunk)
            exchange.send(chunk)
            await exchange.drain()
        exchange.finish()

    def _conclude(self, seen: AnswerCheck) -> None:
        if not self._asks_model or self._concluded:
            return
        self._concluded = True
        problem = seen.problem()
        if problem is None:
            self._session.note_answer()
        else:
            self._session.refused = msgspec.structs.replace(problem, model=self._model())

    async def fail(self, error: Exception) -> None:
        """It got no answer, or not a whole one. A failed call that asked for no model counts while nothing was answered."""
        status = error.status if isinstance(error, UpstreamError | GateError) else None
        cause = f"{type(error).__name__}: {error}"
        if self._asks_model or not self._session.answered:
            self._session.refused = RefusedCall(cause=cause, status=status, model=self._model())
        if not self._recorded and self._session.broken is None:
            try:
                await self._record(status, cause)
            except Exception as problem:  # noqa: BLE001 - the agent must still get its answer; the session is marked broken
                self._session.broken = f"{type(problem).__name__}: {problem}"

    def note_leaving(self) -> None:
        """The agent did not wait for the end of it; many leave a stream as soon as they have read its last event."""
        if self._session.closing or self._concluded or not self._asks_model:
            return
        if self._seen is not None and self._seen.problem() is None:
            self._conclude(self._seen)
            return
        waited = time.time() - self._session.relays.get(self.id, self.began)
        status = GAVE_UP if waited < EXCUSED_WAIT_S else 504
        cause = f"the agent left after {waited:.0f} s without an answer"
        self._session.refused = RefusedCall(cause=cause, status=status, model=self._model())

    async def _record(self, status: int | None, error: str | None = None) -> None:
        if error is None and status is not None and status >= 400:
            error = f"the model server answered {status}"
        await self._calls.record_relay(self._session, self._route, self.began, status=status, error=error)
        self._recorded = True

    def _model(self) -> str:
        """As the agent named it, so that its own choice of a model can be told from ours."""
        if self._route.model:
            return self._route.model
        try:
            return msgspec.json.decode(self._exchange.body, type=_Named).model
        except BAD_JSON:
            return ""


class _Named(msgspec.Struct):
    model: str = ""


def _refuse(error: Exception, codec: Codec, session: Session, exchange: Exchange) -> None:
    refusal = refusal_of(error, codec.name, rollout_id=session.rollout_id, call_id="relayed")
    if exchange.head_sent:
        exchange.abort()  # the agent must see that the body is cut, not take it for the whole
    else:
        body = codec.error(refusal.status, refusal.code, refusal.text)
        exchange.respond(refusal.status, body, extra=refusal.headers())
