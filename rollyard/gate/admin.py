"""The admin API, which opens, shows and closes sessions, and the application that serves it beside the trainer's.

Two keys, two sets of routes: neither key opens the other's routes, and an agent's key opens none of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.protocols import CallLog
from rollyard.gate import rollout_json
from rollyard.gate.keys import key_of, same_key
from rollyard.gate.limits import Budget
from rollyard.gate.metrics import METRICS_TEXT, gate_metrics
from rollyard.gate.operator_request import Endpoint, OperatorRefused, answer, as_json, read_body
from rollyard.gate.trainer import Trainer
from rollyard.net.metrics import write_metrics
from rollyard.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate
    from rollyard.gate.session import Session


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


class SuppliedSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /sessions/{id}`: what a restart takes from a session of this API."""

    api_key: str


def operator_app(gate: Gate, log: CallLog | None) -> Starlette:
    admin, trainer, route = Admin(gate, log), Trainer(gate), guarded_route
    one = "/sessions/{session_id}"
    return Starlette(
        routes=[
            route("/sessions", "POST", gate.admin_key, admin.create),
            route("/sessions", "GET", gate.admin_key, admin.index),
            route(one, "GET", gate.admin_key, admin.show),
            route(one, "PATCH", gate.admin_key, admin.supply),
            route(one, "DELETE", gate.admin_key, admin.delete),
            route(one + "/rollout", "GET", gate.admin_key, admin.rollout),
            route(one + "/trace_entries", "GET", gate.admin_key, admin.entries),
            route("/metrics", "GET", gate.admin_key, admin.metrics),
            *(route(path, method, gate.trainer_key, endpoint) for path, method, endpoint in trainer.endpoints),
        ]
    )


def guarded_route(path: str, method: str, key: str | None, endpoint: Endpoint) -> Route:
    async def check(request: Request) -> Response:
        if not same_key(key_of(dict(request.headers.raw), b""), key):
            return as_json({"error": "this key opens nothing here"}, 401)
        return await endpoint(request)

    async def guarded(request: Request) -> Response:
        return await answer(check, request)

    return Route(path, guarded, methods=[method])


class Admin:
    """The admin's routes: sessions are opened, read, changed and closed."""

    def __init__(self, gate: Gate, log: CallLog | None) -> None:
        self._gate = gate
        self._log = log

    async def create(self, request: Request) -> Response:
        wanted = await read_body(request, NewSession)
        if wanted.eval_sampling is not None and wanted.purpose != "eval":
            raise OperatorRefused(400, "eval_sampling goes with purpose=eval")
        if wanted.api_key is not None and wanted.llm_url is None:
            raise OperatorRefused(400, "api_key goes with llm_url")
        sampling = wanted.eval_sampling if wanted.purpose == "eval" and wanted.eval_sampling else wanted.sampling
        options: dict[str, Any] = {
            "base_url": wanted.llm_url,
            "model": wanted.model,
            "api_key": wanted.api_key,
            "sampling": sampling,
            "max_tokens_cap": wanted.max_tokens_cap,
            "disable_thinking": wanted.disable_thinking,
        }
        budget = Budget(
            calls=wanted.max_model_calls or None,  # there, 0 means no bound
            prompt_tokens=wanted.max_prompt_tokens,
            completion_tokens=wanted.max_completion_tokens,
            wall_s=wanted.max_wall_s,
            concurrent=wanted.max_concurrent or Budget().concurrent,
        )
        session = await self._gate.open_session(
            wanted.session_id or new_id("ro"),
            budget=budget,
            settings={k: v for k, v in options.items() if v is not None},
            metadata={**(wanted.metadata or {}), "purpose": wanted.purpose},
        )
        level = getattr(session.policy, "level", None) if wanted.llm_url is None else None
        root = self._root(request)
        return as_json(
            {
                "session_id": session.rollout_id,
                "api_key": session.key,
                "base_url": f"{root}/v1",
                "root_url": root,
                "mcp_url": f"{root}/mcp",
                "capture_level": level,
                "rollout_type": wanted.purpose if wanted.purpose != "auto" else _type_of(level),
                "max_model_calls": wanted.max_model_calls or 0,
                "llm_url": wanted.llm_url,
                "model": wanted.model,
            }
        )

    def _root(self, request: Request) -> str:
        """The address by which the operator reached us is the one that works from outside a wildcard bind."""
        host = request.headers.get("host")
        url = self._gate.url or "http://localhost"
        return url if not host else f"{url.partition('://')[0]}://{host}"

    async def index(self, request: Request) -> Response:
        return as_json({"sessions": [_summary(s) for s in self._gate.sessions.values()]})

    async def show(self, request: Request) -> Response:
        session = self._gate.sessions.get(request.path_params["session_id"])
        if session is None:
            raise OperatorRefused(404, "unknown session")
        return as_json({**_summary(session), **rollout_json.stats(session.trajectory), "log": session.log_tail()})

    async def supply(self, request: Request) -> Response:
        given = await read_body(request, SuppliedSecret)
        session_id = request.path_params["session_id"]
        if session_id not in self._gate.sessions:
            raise OperatorRefused(404, "unknown session")
        try:
            session = self._gate.supply(session_id, api_key=given.api_key)
        except ConfigError as error:
            raise OperatorRefused(409, error.message) from error
        return as_json(_summary(session))

    async def delete(self, request: Request) -> Response:
        session = self._gate.sessions.get(request.path_params["session_id"])
        if session is None:
            return as_json({"deleted": False}, 404)
        await session.close()
        return as_json({"deleted": True})

    async def rollout(self, request: Request) -> Response:
        trajectory, session = await self._trajectory(request)
        flags = request.query_params
        messages = flags.get("include_messages", "false").lower() in ("true", "1")
        return as_json(
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
            raise OperatorRefused(409, f"nothing here can be trained on (capture level: {level or 'none yet'})")
        return as_json({"session_id": trajectory.rollout_id, "entries": entries})

    async def metrics(self, request: Request) -> Response:
        return Response(write_metrics(gate_metrics(self._gate)), media_type=METRICS_TEXT)

    async def _trajectory(self, request: Request) -> tuple[Trajectory, Session | None]:
        """An open session's trajectory comes from memory, a closed one's from the log."""
        rollout_id = request.path_params["session_id"]
        session = self._gate.sessions.get(rollout_id)
        if session is not None:
            await self._gate.calls.restore(session)
            return session.trajectory, session
        if self._log is not None:
            records, nodes = await self._log.load_calls(rollout_id)
            if records:
                return Trajectory.restore(rollout_id, records, nodes), None
        raise OperatorRefused(404, "unknown session")


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
        "missing": dict(session.missing),
        "prompt_tokens": session.prompt_tokens,
        "completion_tokens": session.completion_tokens,
        "metadata": _show(session.metadata),
    }
