"""The trainer API: take held calls and answer them, say which policy version is live, pause the gate while weights change.

Held calls are handed out at least once: those that a vanished trainer had taken are listed by `GET /calls?taken=true`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.call import Call, Reply
from rollyard.core.protocols import Held
from rollyard.gate import rollout_json
from rollyard.gate.operator_request import Endpoint, OperatorRefused, as_json, read_body, read_number
from rollyard.wire import CODECS

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate

MAX_WAIT_S = 60.0
MAX_BATCH = 1024


class ReplyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /calls/{id}/reply`: token ids with their logprobs, or text, or a whole chat completion."""

    ids: list[int] | None = None
    logprobs: list[float] | None = None
    text: str | None = None
    response: dict[str, Any] | None = None
    version: int | None = None
    finish: Literal["stop", "tool_calls", "length"] | None = None


class FailureBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: str = "the trainer refused this call"
    status: int = 500


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int


class Trainer:
    """The trainer's routes: held calls, the policy's version, pause and resume."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._taken: WeakValueDictionary[str, Held] = WeakValueDictionary()  # entries go when their call ends
        self._back: list[Held] = []  # taken for a reader that was gone when they came

    @property
    def endpoints(self) -> tuple[tuple[str, str, Endpoint], ...]:
        """Path, method and what answers, for a server of the trainer's API."""
        return (
            ("/calls", "GET", self.take),
            ("/calls/{call_id}/reply", "POST", self.reply),
            ("/calls/{call_id}/fail", "POST", self.fail),
            ("/policy_version", "GET", self.version),
            ("/policy_version", "POST", self.set_version),
            ("/pause", "POST", self.pause),
            ("/resume", "POST", self.resume),
        )

    async def take(self, request: Request) -> Response:
        """`?wait=` seconds for a first call, `?max=` calls; `?taken=true` lists those taken and not yet answered."""
        flags = request.query_params
        if flags.get("taken", "false").lower() in ("true", "1"):
            return as_json(
                {"calls": [_describe_call(h.call) for h in self._taken.values() if getattr(h, "open", True)]}
            )
        wait = read_number(flags, "wait", 0, most=MAX_WAIT_S)
        most = int(read_number(flags, "max", 64, least=1, most=MAX_BATCH))
        batch = await self._batch(request, most, wait)
        for held in batch:
            self._taken[held.call.id] = held
        return as_json(
            {"calls": [_describe_call(h.call) for h in batch], "policy_version": self._gate.calls.policy_version}
        )

    async def _batch(self, request: Request, most: int, wait: float) -> Sequence[Held]:
        ready = [held for held in self._back if getattr(held, "open", True)]
        self._back = ready[most:]
        if ready:
            return ready[:most]
        taking = asyncio.ensure_future(self._queue().take(most, 0.01, timeout=max(wait, 0.001)))
        gone = asyncio.ensure_future(_await_disconnect(request))
        try:
            await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                return []
            batch = list(taking.result())
        except TimeoutError:
            return []
        finally:
            taking.cancel()
            gone.cancel()
        if gone.done() and not gone.cancelled():
            self._back.extend(batch)
            return []
        return batch

    def _queue(self) -> Any:
        if not hasattr(self._gate.policy, "take"):
            raise OperatorRefused(409, "this gate holds no calls: it was not started with mode interception_gate")
        return self._gate.policy

    async def reply(self, request: Request) -> Response:
        answer = await read_body(request, ReplyBody)
        held = self._find(request)
        given = [n for n in ("ids", "text", "response") if getattr(answer, n) is not None]
        if len(given) != 1:
            raise OperatorRefused(400, "give one of ids, text, response")
        fields: dict[str, Any] = {"version": answer.version}
        if answer.finish is not None:
            fields["finish"] = answer.finish
        if answer.ids is not None:
            await held.reply(answer.ids, answer.logprobs, **fields)
        elif answer.text is not None:
            await held.reply(text=answer.text, **fields)
        else:
            reply: Reply = CODECS["chat"].decode_reply(msgspec.json.encode(answer.response), held.call)
            if answer.version is not None:
                reply = msgspec.structs.replace(reply, version_start=answer.version, version_end=answer.version)
            await held.reply(reply=reply)
        self._taken.pop(held.call.id, None)
        return as_json({"ok": True})

    async def fail(self, request: Request) -> Response:
        failure = await read_body(request, FailureBody)
        held = self._find(request)
        await held.fail(failure.message, status=failure.status)
        self._taken.pop(held.call.id, None)
        return as_json({"ok": True})

    def _find(self, request: Request) -> Held:
        held = self._taken.get(request.path_params["call_id"])
        if held is None:
            raise OperatorRefused(409, "no such call waits: it was answered, cancelled, closed or never taken")
        return held

    async def version(self, request: Request) -> Response:
        return as_json({"policy_version": self._gate.calls.policy_version})

    async def set_version(self, request: Request) -> Response:
        self._gate.calls.policy_version = (await read_body(request, Version)).version
        return await self.version(request)

    async def pause(self, request: Request) -> Response:
        """New calls wait from now on. `?wait=` seconds for those at the policy to finish; says how many are left."""
        fair_queue = self._gate.calls.fair_queue
        fair_queue.pause()
        wait = read_number(request.query_params, "wait", 0, most=MAX_WAIT_S)
        try:
            async with asyncio.timeout(wait):
                await fair_queue.idle()
        except TimeoutError:
            pass
        return as_json({"paused": True, "in_flight": fair_queue.active})

    async def resume(self, request: Request) -> Response:
        self._gate.calls.fair_queue.resume()
        return as_json({"paused": False})


async def _await_disconnect(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _describe_call(call: Call) -> dict[str, Any]:
    """A call as a trainer in another process sees it: chat messages and tools whatever dialect it came in."""
    return {
        "call_id": call.id,
        "session_id": call.rollout_id,
        "dialect": call.dialect,
        "model": call.model,
        "kind": call.kind,
        "thread": call.thread,
        **rollout_json.chat_request(call),
        "sampling": {k: v for k, v in msgspec.to_builtins(call.wanted).items() if v is not None},
        "prompt_ids": None if call.prompt_ids is None else list(call.prompt_ids),
        "received_at": call.received_at,
    }
