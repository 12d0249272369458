"""The operator's and the trainer's faces: two keys, two sets of routes, one small Starlette application.

The admin key opens, shows and closes sessions. The trainer key takes held calls and answers them, says which policy version
is live, and pauses the gate while weights change. Neither opens the other's routes, and an agent's key opens none of them.
Held calls are handed out at least once: those that a vanished trainer had taken are listed by `GET /calls?taken=true`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollyard.core.call import Call, Reply
from rollyard.core.errors import ConfigError, Error, GateError, PolicyError, ReplyRefused
from rollyard.core.ids import new_id
from rollyard.core.protocols import CallLog, Held
from rollyard.gate import rollout_json
from rollyard.gate.keys import key_of, same_key
from rollyard.gate.limits import Budget
from rollyard.gate.metrics import gate_metrics
from rollyard.net.metrics import write_metrics
from rollyard.trajectory.trajectory import Trajectory
from rollyard.wire import CODECS

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate
    from rollyard.gate.session import Session

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
MAX_WAIT_S = 60.0
MAX_BATCH = 1024


class NewSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /sessions`: the fields of OpenEnv's capture proxy, and the rest of our budget."""

    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    max_model_calls: int | None = None
    sampling: dict[str, Any] | None = None
    purpose: Literal["auto", "train", "eval"] = "auto"
    eval_sampling: dict[str, Any] | None = None
    llm_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    auth_header: Literal["Authorization"] | None = None
    provider: Literal["openai"] | None = None
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_wall_s: float | None = None
    max_concurrent: int | None = None
    max_tokens_cap: int | None = None
    disable_thinking: bool | None = None


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


class AdminRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def operator_app(gate: Gate, log: CallLog | None) -> Starlette:
    admin, trainer = Admin(gate, log), Trainer(gate)

    def route(path: str, method: str, key: str | None, endpoint: Endpoint) -> Route:
        return Route(path, _guard(key, endpoint), methods=[method])

    one = "/sessions/{session_id}"
    return Starlette(
        routes=[
            route("/sessions", "POST", gate.admin_key, admin.create),
            route("/sessions", "GET", gate.admin_key, admin.index),
            route(one, "GET", gate.admin_key, admin.show),
            route(one, "DELETE", gate.admin_key, admin.delete),
            route(one + "/rollout", "GET", gate.admin_key, admin.rollout),
            route(one + "/trace_entries", "GET", gate.admin_key, admin.entries),
            route("/metrics", "GET", gate.admin_key, admin.metrics),
            *(route(path, method, gate.trainer_key, endpoint) for path, method, endpoint in trainer.endpoints),
        ]
    )


def _guard(key: str | None, endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> Response:
        given = key_of(dict(request.headers.raw), b"")
        if not same_key(given, key):
            return _json({"error": "this key opens nothing here"}, 401)
        return await answer(endpoint, request)

    return guarded


async def answer(endpoint: Endpoint, request: Request) -> Response:
    """What an endpoint says, or the status and reason of what it refuses."""
    try:
        return await endpoint(request)
    except GateError as error:
        return _json({"error": error.message}, error.status)
    except AdminRefused as error:
        return _json({"error": str(error)}, error.status)
    except ReplyRefused as error:
        return _json({"error": error.message}, 409)
    except (ConfigError, PolicyError, msgspec.MsgspecError) as error:
        return _json({"error": error.message if isinstance(error, Error) else str(error)}, 400)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _body(request: Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.body() or b"{}", type=kind)


class Admin:
    def __init__(self, gate: Gate, log: CallLog | None) -> None:
        self._gate = gate
        self._log = log

    async def create(self, request: Request) -> Response:
        asked = await _body(request, NewSession)
        if asked.eval_sampling is not None and asked.purpose != "eval":
            raise AdminRefused(400, "eval_sampling goes with purpose=eval")
        if asked.api_key is not None and asked.llm_url is None:
            raise AdminRefused(400, "api_key goes with llm_url")
        sampling = asked.eval_sampling if asked.purpose == "eval" and asked.eval_sampling else asked.sampling
        options: dict[str, Any] = {
            "base_url": asked.llm_url,
            "model": asked.model,
            "api_key": asked.api_key,
            "sampling": sampling,
            "max_tokens_cap": asked.max_tokens_cap,
            "disable_thinking": asked.disable_thinking,
        }
        budget = Budget(
            calls=asked.max_model_calls or None,  # there, 0 means no bound
            prompt_tokens=asked.max_prompt_tokens,
            completion_tokens=asked.max_completion_tokens,
            wall_s=asked.max_wall_s,
            concurrent=asked.max_concurrent or Budget().concurrent,
        )
        session = await self._gate.open_session(
            asked.session_id or new_id("ro"),
            budget=budget,
            settings={k: v for k, v in options.items() if v is not None},
            metadata={**(asked.metadata or {}), "purpose": asked.purpose},
        )
        level = getattr(session.policy, "level", None) if asked.llm_url is None else None
        root = self._root(request)
        return _json(
            {
                "session_id": session.rollout_id,
                "api_key": session.key,
                "base_url": f"{root}/v1",
                "root_url": root,
                "mcp_url": f"{root}/mcp",
                "capture_level": level,
                "rollout_type": asked.purpose if asked.purpose != "auto" else _type_of(level),
                "max_model_calls": asked.max_model_calls or 0,
                "llm_url": asked.llm_url,
                "model": asked.model,
            }
        )

    def _root(self, request: Request) -> str:
        """The address by which the operator reached us is the one that works from outside a wildcard bind."""
        host = request.headers.get("host")
        url = self._gate.url or "http://localhost"
        return url if not host else f"{url.partition('://')[0]}://{host}"

    async def index(self, request: Request) -> Response:
        return _json({"sessions": [_summary(s) for s in self._gate.sessions.values()]})

    async def show(self, request: Request) -> Response:
        session = self._gate.sessions.get(request.path_params["session_id"])
        if session is None:
            raise AdminRefused(404, "unknown session")
        return _json({**_summary(session), **rollout_json.stats(session.trajectory), "log": session.log_tail()})

    async def delete(self, request: Request) -> Response:
        session = self._gate.sessions.get(request.path_params["session_id"])
        if session is None:
            return _json({"deleted": False}, 404)
        await session.close()
        return _json({"deleted": True})

    async def rollout(self, request: Request) -> Response:
        trajectory, session = await self._trajectory(request)
        flags = request.query_params
        messages = flags.get("include_messages", "false").lower() in ("true", "1")
        return _json(
            rollout_json.rollout_document(
                trajectory,
                metadata={} if session is None else _show(session.metadata),
                budget_stops=sum(1 for r in trajectory.records if r.finish == "budget"),
                purpose="auto" if session is None else str(session.metadata.get("purpose", "auto")),
                include_discarded=flags.get("include_discarded", "false").lower() in ("true", "1"),
                requests=await rollout_json.requests_of(trajectory, self._log) if messages else None,
            )
        )

    async def entries(self, request: Request) -> Response:
        trajectory, session = await self._trajectory(request)
        entries = rollout_json.trace_entries(trajectory, await rollout_json.requests_of(trajectory, self._log))
        if not entries or (session is not None and session.metadata.get("purpose") == "eval"):
            level = rollout_json.capture_level(trajectory.records)
            raise AdminRefused(409, f"nothing here can be trained on (capture level: {level or 'none yet'})")
        return _json({"session_id": trajectory.rollout_id, "entries": entries})

    async def metrics(self, request: Request) -> Response:
        return Response(write_metrics(gate_metrics(self._gate)), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _trajectory(self, request: Request) -> tuple[Trajectory, Session | None]:
        """Of an open session from memory; of a closed one from the log."""
        rollout_id = request.path_params["session_id"]
        session = self._gate.sessions.get(rollout_id)
        if session is not None:
            await self._gate.calls.restore(session)
            return session.trajectory, session
        if self._log is not None:
            records, nodes = await self._log.load_calls(rollout_id)
            if records:
                return Trajectory.restore(rollout_id, records, nodes), None
        raise AdminRefused(404, "unknown session")


class Trainer:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._taken: WeakValueDictionary[str, Held] = WeakValueDictionary()  # entries go when their call ends
        self._back: list[Held] = []  # taken for a reader that was gone when they came

    @property
    def endpoints(self) -> tuple[tuple[str, str, Endpoint], ...]:
        """Path, method and what answers, for whoever serves a trainer."""
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
            return _json({"calls": [_describe_call(h.call) for h in self._taken.values() if getattr(h, "open", True)]})
        wait = _number(flags, "wait", 0, most=MAX_WAIT_S)
        most = int(_number(flags, "max", 64, least=1, most=MAX_BATCH))
        batch = await self._batch(request, most, wait)
        for held in batch:
            self._taken[held.call.id] = held
        return _json(
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
            raise AdminRefused(409, "this gate holds no calls: it was not started with mode interception_gate")
        return self._gate.policy

    async def reply(self, request: Request) -> Response:
        answer = await _body(request, ReplyBody)
        held = self._find(request)
        given = [n for n in ("ids", "text", "response") if getattr(answer, n) is not None]
        if len(given) != 1:
            raise AdminRefused(400, "give one of ids, text, response")
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
        return _json({"ok": True})

    async def fail(self, request: Request) -> Response:
        failure = await _body(request, FailureBody)
        held = self._find(request)
        await held.fail(failure.message, status=failure.status)
        self._taken.pop(held.call.id, None)
        return _json({"ok": True})

    def _find(self, request: Request) -> Held:
        held = self._taken.get(request.path_params["call_id"])
        if held is None:
            raise AdminRefused(409, "no such call waits: it was answered, cancelled, closed or never taken")
        return held

    async def version(self, request: Request) -> Response:
        return _json({"policy_version": self._gate.calls.policy_version})

    async def set_version(self, request: Request) -> Response:
        self._gate.calls.policy_version = (await _body(request, Version)).version
        return await self.version(request)

    async def pause(self, request: Request) -> Response:
        """New calls wait from now on. `?wait=` seconds for those at the policy to finish; says how many are left."""
        turnstile = self._gate.calls.turnstile
        turnstile.pause()
        wait = _number(request.query_params, "wait", 0, most=MAX_WAIT_S)
        try:
            async with asyncio.timeout(wait):
                await turnstile.idle()
        except TimeoutError:
            pass
        return _json({"paused": True, "in_flight": turnstile.active})

    async def resume(self, request: Request) -> Response:
        self._gate.calls.turnstile.resume()
        return _json({"paused": False})


async def _await_disconnect(request: Request) -> None:
    """Returns when whoever asked has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _number(flags: Mapping[str, str], name: str, default: float, *, least: float = 0.0, most: float) -> float:
    """A number of the query, within its bounds."""
    text = flags.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise AdminRefused(400, f"{name}={text} is no number")
    return min(max(value, least), most)


def _type_of(level: str | None) -> str | None:
    return None if level is None else "train" if level == "tokens" else "eval"


def _show(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metadata.items() if k != "purpose"}


def _summary(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.rollout_id,
        "turns": session.calls,
        "in_flight": session.in_flight,
        "idle_s": round(time.monotonic() - session.last_activity, 1),
        "created_at": session.created_at,
        "budget_stop_count": session.budget_stops,
        "exhausted": session.exhausted,
        "reached": session.reached,
        "prompt_tokens": session.prompt_tokens,
        "completion_tokens": session.completion_tokens,
        "metadata": _show(session.metadata),
    }


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
