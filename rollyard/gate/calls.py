"""The path of one call: decode, join or begin a turn, find the call it continues, ask the policy, commit, answer.

The order is the promise. An answer is complete and committed before its first content byte leaves, so a process killed at
any moment has forgotten nothing that an agent was told. A turn belongs to its task, not to the connection that began it:
when the reader goes away the turn goes on for a while, and a reader that comes back gets its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from rollyard.core.call import Call, CallRecord, Finish, Reply
from rollyard.core.errors import BranchDiverged, GateError, SessionClosed, StoreError, UpstreamError
from rollyard.core.ids import new_id
from rollyard.core.message import Message, Text
from rollyard.core.node import Added
from rollyard.core.protocols import CallLog, Policy
from rollyard.gate.classify import KEPT_HEADERS, label
from rollyard.gate.fairness import FairQueue
from rollyard.gate.limits import GateLimits
from rollyard.gate.metrics import GateCounters
from rollyard.gate.pending import GateRefusal, PendingReader, PendingTurn, turn_key
from rollyard.gate.refusals import refusal_of, stop_reason
from rollyard.gate.restore import note_shape, restore
from rollyard.gate.session import EXCUSED_WAIT_S, GAVE_UP, RefusedCall
from rollyard.net.exchange import Exchange
from rollyard.wire import CODECS, Route
from rollyard.wire.codec import Codec, WireRequest
from rollyard.wire.history import CHAT_HISTORY

if TYPE_CHECKING:
    from rollyard.gate.session import Session

_CLOSED = GateRefusal(status=409, code=SessionClosed.code, message="this rollout is over")
_DIVERGED = "this rollout is not where the one it branches off was"  # what differs is the operator's to know
_GONE = "no reader was left"
_SPENT = {
    "calls": "the number of model calls",
    "prompt_tokens": "the number of prompt tokens",
    "completion_tokens": "the number of completion tokens",
    "wall_s": "the time",
}
_NO_HEADERS: dict[str, str] = {}
_NO_HISTORY = memoryview(b"")


class Calls:
    """Answers the calls of all sessions. One of these per gate."""

    def __init__(self, log: CallLog | None, limits: GateLimits, counters: GateCounters) -> None:
        self.fair_queue = FairQueue(limits.concurrent, queue=limits.queue, wait_s=limits.queue_s)
        self.policy_version: int | None = None
        # Policy -> the newest version it answered with
        self._seen: WeakKeyDictionary[Policy, int] = WeakKeyDictionary()
        self._log = log
        self._limits = limits
        self._counters = counters
        self._live: set[PendingTurn] = set()

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def newest_version(self, policy: Policy) -> int | None:
        """The newest that is known: by the trainer's word, the policy's own, or an answer to any of its rollouts."""
        known = (self.policy_version, getattr(policy, "version", None), self._seen_version(policy))
        return max((version for version in known if version is not None), default=None)

    def _seen_version(self, policy: Policy) -> int | None:
        try:
            return self._seen.get(policy)
        except TypeError:  # it cannot be referred to weakly: then its own word and the trainer's count
            return None

    def tick(self, now: float) -> None:
        limits = self._limits
        for turn in tuple(self._live):
            turn.tick(now, limits.status_s, limits.keepalive_s)

    def receive(self, session: Session, route: Route, exchange: Exchange) -> None:
        """A whole request of an open session."""
        if session.restored:
            session.spawn(self._receive_later(session, route, exchange))
            return
        codec, known = CODECS[route.dialect], len(session.memo)
        try:
            self._receive(session, route, codec, exchange)
        except GateError as error:
            _forget(session.memo, known)
            self._counters.count_refusal(error.status)
            session.note(f"{exchange.method} {route.dialect} -> {error.status} {error.message}")
            session.refused = RefusedCall(cause=f"{type(error).__name__}: {error}", status=error.status)
            shown = _DIVERGED if isinstance(error, BranchDiverged) else error.message
            exchange.respond(error.status, codec.error(error.status, error.code, shown))

    async def _receive_later(self, session: Session, route: Route, exchange: Exchange) -> None:
        async with self._answering(session, route, exchange):
            await self.restore(session)
            self.receive(session, route, exchange)

    @asynccontextmanager
    async def _answering(self, session: Session, route: Route, exchange: Exchange) -> AsyncGenerator[None]:
        """What goes wrong within is the answer: no request of a task of its own waits for nothing."""
        try:
            yield
        except asyncio.CancelledError:  # only the session's end cancels such a task
            self._refuse_now(_CLOSED, route, exchange)
            raise
        except Exception as error:  # noqa: BLE001 - `refusal_of` keeps it
            refusal = refusal_of(error, route.dialect, rollout_id=session.rollout_id, call_id=exchange.path)
            session.note(f"{exchange.method} {route.dialect} -> {refusal.status} {type(error).__name__}: {error}")
            self._refuse_now(refusal, route, exchange)

    def _refuse_now(self, refusal: GateRefusal, route: Route, exchange: Exchange) -> None:
        self._counters.count_refusal(refusal.status)
        body = CODECS[route.dialect].error(refusal.status, refusal.code, refusal.text)
        exchange.respond(refusal.status, body, extra=refusal.headers())

    async def restore(self, session: Session) -> None:
        """Read back the history of a session that outlived a restart, once."""
        if not session.restored or self._log is None:
            return
        if session.restoring is None:
            work = restore(session, self._log, self._limits.commit_s)
            session.restoring = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.shield(session.restoring)
        except Exception as error:  # kept on the session, so that later calls say the same
            session.broken = f"{type(error).__name__}: {error}"
            session.restored = False
            raise

    def _receive(self, session: Session, route: Route, codec: Codec, exchange: Exchange) -> None:
        _refuse_broken(session)
        now = session.last_activity = time.monotonic()
        body = exchange.body
        known = session.memo.get(CHAT_HISTORY)
        digest = session.body_digest.digest(body, _NO_HISTORY if known is None else known.text)
        headers = exchange.headers
        mark = headers.get(b"idempotency-key")
        idempotency = None if mark is None else mark.decode("latin-1")
        retried = headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")
        key = turn_key(route.dialect, digest, route.model)
        turn = session.turns.find(key, idempotency, retried)
        if turn is not None:
            call = turn.call or codec.decode(self._request(session, route, exchange), session.memo)
            if route.stream is not None:  # the path says how this reader reads
                call = msgspec.structs.replace(call, stream=route.stream, framing=route.framing)
            self._counters.joined += 1
            session.note(f"{route.dialect} joined an earlier turn")
            turn.join(PendingReader(exchange, codec, call, now))
            return
        request = self._request(session, route, exchange)
        session.refuse_server_tools(route.dialect, body)
        call = codec.decode(request, session.memo)
        said = label(call, request.headers, session.shape)
        call = msgspec.structs.replace(
            call,
            kind=said.kind,
            thread=said.thread,
            parent_thread=said.parent_thread,
            options=session.settings,
            raw_digest=digest,
        )
        sent, recorded = call.messages, None
        if session.prefix is not None:
            call, recorded = session.prefix.take(call)
        match = session.trajectory.match(call)
        call = msgspec.structs.replace(call, continues=match.continues, fork_reason=match.reason)
        turn = PendingTurn(
            key,
            call,
            deadline=now + self._limits.call_s,
            orphan_s=self._limits.orphan_held_s if session.held else self._limits.orphan_s,
            idempotency=idempotency,
            match=match,
            recorded=recorded,
            pinned=call.messages is not sent,
        )
        reader = PendingReader(exchange, codec, call, now)
        turn.join(reader)
        session.turns.begin(turn)
        self._live.add(turn)
        turn.task = asyncio.get_running_loop().create_task(self._run(session, turn, call, codec, reader))

    def _request(self, session: Session, route: Route, exchange: Exchange) -> WireRequest:
        kept = {KEPT_HEADERS[k]: v.decode("latin-1") for k, v in exchange.headers.items() if k in KEPT_HEADERS}
        return WireRequest(
            call_id=new_id("call"),
            rollout_id=session.rollout_id,
            body=exchange.body,
            headers=kept or _NO_HEADERS,
            model=route.model,
            stream=route.stream,
            framing=route.framing,
            received_at=time.time(),
        )

    async def _run(self, session: Session, turn: PendingTurn, call: Call, codec: Codec, first: PendingReader) -> None:
        reply: Reply | None = None
        failure: BaseException | None = None
        body = b""
        try:
            asked = msgspec.structs.replace(call, raw=b"") if turn.pinned else call
            if session.before_answer is not None and call.kind == "agent":
                await session.before_answer(call, turn.recorded is not None)
            reply = turn.recorded or self._stop(session, call) or await self._ask(session, asked)
            body = first.encode(reply)
            added = _add_to_trajectory(session, turn, call, reply)
            reply = _replayable(call, reply)  # a token is an object: they go while they are in the processor's cache
            await self._commit(session, turn, added)
        except asyncio.CancelledError:  # only we cancel this task: the rollout closed, time ran out, no reader is left
            failure = TimeoutError("the policy took too long") if turn.expired else None
            refusal = _CLOSED if session.closing else None
        except Exception as error:  # noqa: BLE001 - whatever a policy raises is an answer to the agent and a record, never a crash
            failure, refusal = error, None
        else:
            self._record_answer(session, turn, call, reply, body, first)
            return
        finally:
            self._live.discard(turn)
        try:
            await self._record_failure(session, turn, call, failure, refusal)
        finally:
            # Its traceback holds this frame: all that the failed call read would wait for the garbage collector
            del failure

    async def _ask(self, session: Session, call: Call) -> Reply:
        lane, fair_queue = session.lane, self.fair_queue
        if not fair_queue.enter_now(lane):
            await fair_queue.enter(lane)
        version = self.policy_version
        try:
            session.calls += 1
            reply = await session.policy(call)
        finally:
            fair_queue.leave(lane)
        session.charge(reply)
        if reply.finished_at is None:
            reply = msgspec.structs.replace(reply, finished_at=time.time())
        if version is not None and reply.version_start is None:
            reply = msgspec.structs.replace(reply, version_start=version, version_end=self.policy_version)
        if reply.version_end is not None:
            with suppress(TypeError):
                self._seen[session.policy] = max(reply.version_end, self._seen.get(session.policy, reply.version_end))
        session.note_version(reply)
        return reply

    def _stop(self, session: Session, call: Call) -> Reply | None:
        """Past its budget an agent is told so in words: an empty answer makes some of them ask for ever."""
        spent = session.find_spent()
        if spent is None:
            return None
        session.exhausted = session.exhausted or spent
        session.budget_stops += 1
        self._counters.budget_stops += 1
        words = f"The budget of this task is used up ({_SPENT[spent]}). Stop here: make no further calls and finish."
        now = time.time()
        return Reply(
            message=Message("assistant", (Text(words),)),
            finish="budget",
            model=call.model,
            trainable=False,
            flaws=("answered by the gate: budget",),
            started_at=now,
            finished_at=now,
        )

    async def _commit(self, session: Session, turn: PendingTurn | None, added: Added) -> None:
        if self._log is None:
            return
        if turn is not None:  # `tick` is the deadline: a timer for each commit would cost as much as the hashing
            turn.committing = time.monotonic() + self._limits.commit_s
        try:
            await self._log.commit(added.record, added.nodes, added.blobs)
        except BaseException as failure:  # kept on the session: what was not committed stops it
            session.broken = f"{type(failure).__name__}: {failure}"
            if turn is not None and turn.expired:
                raise StoreError("the call log did not answer in time", rollout_id=session.rollout_id) from failure
            raise

    def _record_answer(
        self, session: Session, turn: PendingTurn, call: Call, reply: Reply, body: bytes, first: PendingReader
    ) -> None:
        now = session.last_activity = time.monotonic()
        if turn.recorded is not None:
            session.note_recorded(reply)
        elif reply.finish != "budget":
            session.note_answer()
        self._counters.count_answer(call.dialect, call.kind, now - first.since)
        session.turns.finish(turn)
        turn.answer(reply, body, first)
        session.note("%s %s %s -> %s in %.3f s", call.dialect, call.kind, call.id, reply.finish, now - first.since)

    async def _record_failure(
        self,
        session: Session,
        turn: PendingTurn,
        call: Call,
        failure: BaseException | None,
        refusal: GateRefusal | None,
    ) -> None:
        session.turns.fail(turn)
        cause = _GONE if failure is None else f"{type(failure).__name__}: {failure}"
        if refusal is None:
            shown = failure if failure is not None else TimeoutError(_GONE)
            refusal = refusal_of(shown, call.dialect, rollout_id=session.rollout_id, call_id=call.id)
        else:
            cause = refusal.message
        self._counters.count_refusal(refusal.status)
        status = failure.status if isinstance(failure, UpstreamError | GateError) else None
        if failure is None and time.time() - call.received_at < EXCUSED_WAIT_S:
            status = GAVE_UP
        reason = stop_reason(failure) if failure is not None else None
        session.refused = RefusedCall(cause=cause, status=status, model=call.model, reason=reason)
        session.note(f"{call.dialect} {call.kind} {call.id} -> {refusal.status} {refusal.code} {refusal.id or ''}")
        if session.broken is None:
            try:
                async with asyncio.timeout(self._limits.commit_s):
                    await self._commit(session, turn, _add_to_trajectory(session, turn, call, None, cause, status))
            except Exception as error:  # noqa: BLE001 - the agent must still get its answer; the session is marked broken
                refusal_of(error, call.dialect, rollout_id=session.rollout_id, call_id=call.id)
        turn.refuse(refusal)
        session.last_activity = time.monotonic()

    async def preload(self, session: Session, history: Sequence[tuple[Call, Reply]]) -> None:
        """What a rollout begins with that its agent does not ask for: recorded as if it had."""
        for call, reply in history:
            async with asyncio.timeout(self._limits.commit_s):
                await self._commit(session, None, _add_to_trajectory(session, None, call, reply))
            session.note_recorded(reply)
        if history:
            note_shape(session, session.trajectory)

    async def ask_aside(self, session: Session, policy: Policy, call: Call) -> Reply:
        """A call that no agent made, of another party of the same rollout, answered by a policy of its own and recorded."""
        match = session.trajectory.match(call)
        call = msgspec.structs.replace(
            call, continues=match.continues, fork_reason=match.reason, received_at=time.time()
        )
        async with asyncio.timeout(self._limits.call_s):
            reply = await policy(call)
        async with asyncio.timeout(self._limits.commit_s):
            await self._commit(session, None, _add_to_trajectory(session, None, call, reply))
        return reply

    # -- calls that no policy turn answers

    def count(self, session: Session, route: Route, exchange: Exchange) -> None:
        """A token count is a side call: it is answered with the best number there is and recorded as auxiliary."""
        session.spawn(self._count(session, route, exchange))

    async def _count(self, session: Session, route: Route, exchange: Exchange) -> None:
        codec = CODECS[route.dialect]
        async with self._answering(session, route, exchange):
            await self.restore(session)
            _refuse_broken(session)
            known = len(session.memo)
            try:
                call = codec.decode(self._request(session, route, exchange), session.memo)
            finally:
                _forget(session.memo, known)
            call = msgspec.structs.replace(call, kind="auxiliary", options=session.settings)
            counter: Any = getattr(session.policy, "count_tokens", None)
            counted = await counter(call) if counter is not None else None
            async with asyncio.timeout(self._limits.commit_s):
                await self._commit(session, None, _add_to_trajectory(session, None, call, None))
            exchange.respond(200, codec.count_tokens(estimate(call) if counted is None else counted))

    async def stop_if_spent(self, session: Session, route: Route, exchange: Exchange) -> bool:
        """Answer a relayed call that is past the budget; False when it is not."""
        if session.find_spent() is None or route.endpoint != "generate":
            return False
        codec = CODECS[route.dialect]
        try:
            call = codec.decode(self._request(session, route, exchange))
        except GateError:  # a request that only the provider could read is told in the least words
            exchange.respond(429, codec.error(429, "rate_limit_error", "the budget of this task is used up"))
            return True
        reply = self._stop(session, call)
        assert reply is not None
        await self.record_relay(session, route, call.received_at, finish="budget")
        PendingReader(exchange, codec, call, time.monotonic()).answer(reply)
        return True

    async def record_relay(
        self,
        session: Session,
        route: Route,
        at: float,
        *,
        status: int | None = None,
        error: str | None = None,
        finish: Finish | None = None,
    ) -> None:
        """That a call happened, when, and with which status; nothing of what was in it (`black_box`)."""
        session.relayed += 1
        if self._log is None:
            return
        record = CallRecord(
            id=new_id("call"),
            rollout_id=session.rollout_id,
            seq=session.relayed,
            dialect=route.dialect,
            kind="agent",
            edge="root",
            capture="none",
            finish=finish,
            status=status,
            error=error,
            trainable=False,
            received_at=at,
            finished_at=time.time(),
        )
        async with asyncio.timeout(self._limits.commit_s):
            await self._log.commit(record, (), {})


class StoreBroken(GateError):
    status = 503
    code = "api_error"


def _refuse_broken(session: Session) -> None:
    if session.broken is not None:
        raise StoreBroken("the gate cannot record calls of this rollout any more")


def _forget(memo: dict[bytes, Any], known: int) -> None:
    """What came to a memo after its first `known` entries: an agent may send any number of requests that nothing keeps."""
    while len(memo) > known:
        memo.popitem()


def estimate(call: Call) -> int:
    """Four bytes to a token: what is left when a policy cannot count."""
    return max(1, len(call.raw) // 4)


def _add_to_trajectory(
    session: Session,
    turn: PendingTurn | None,
    call: Call,
    reply: Reply | None,
    error: str | None = None,
    status: int | None = None,
) -> Added:
    match = None if turn is None else turn.match
    return session.trajectory.add(call, reply, match=match, error=error, status=status)


def _replayable(call: Call, reply: Reply) -> Reply:
    """What is needed to say it again: not the ids, not the raw body, not the tokens that the agent did not ask to see; those
    are in the log."""
    return msgspec.structs.replace(
        reply,
        raw=b"",
        prompt_ids=None,
        completion_ids=None,
        logprobs=None,
        experts=None,
        engine={},
        sampling=None,
        tokens=reply.tokens if call.sampling.logprobs else (),
    )
