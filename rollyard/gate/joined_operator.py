"""The admin's and the trainer's API of a gate in several processes: each answer is one of all of them.

A request that names a session goes to the process that serves it, with its connection. What is created goes where its id belongs;
what is about all sessions is asked of every process and joined. The trainer's requests all come to the first process, which asks
the others in the order in which they came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.log import Log
from rollyard.gate.admin import NewSession, guarded_route
from rollyard.gate.metrics import METRICS_TEXT, add_metrics
from rollyard.gate.operator_request import OperatorRefused, as_json, read_body, read_number
from rollyard.gate.processes import ANSWER_S, GateProcess, SiblingAnswer, SiblingSilent, write_request
from rollyard.gate.trainer import MAX_WAIT_S

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate

_log = Log("rollyard.gate")
STATE, STATE_S = "/trainer_state", 2.0


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer has set, as a process that was started again learns it."""

    policy_version: int | None
    paused: bool


def sibling_app(gate: Gate, process: GateProcess, alone: Starlette) -> Starlette:
    """What a process answers for itself, to the others."""

    async def state(request: Request) -> Response:
        if process.again:
            raise OperatorRefused(503, "this process does not know it yet")
        calls = gate.calls
        return as_json(TrainerState(policy_version=calls.policy_version, paused=calls.fair_queue.paused))

    return Starlette(routes=[guarded_route(STATE, "GET", gate.trainer_key, state), *alone.routes])


def joined_app(gate: Gate, process: GateProcess, alone: Starlette) -> Starlette:
    """What any process answers for the whole gate."""
    joined = JoinedOperator(process, gate.admin_key, gate.trainer_key)
    routes = [
        guarded_route("/sessions", "POST", gate.admin_key, joined.create),
        guarded_route("/sessions", "GET", gate.admin_key, joined.index),
        guarded_route("/metrics", "GET", gate.admin_key, joined.metrics),
        guarded_route("/policy_version", "POST", gate.trainer_key, joined.set_version),
        guarded_route("/pause", "POST", gate.trainer_key, joined.pause),
        guarded_route("/resume", "POST", gate.trainer_key, joined.resume),
    ]
    return Starlette(routes=[*routes, *alone.routes])


async def catch_up(gate: Gate, process: GateProcess) -> None:
    """A process that replaces one that died learns from the others what the trainer has set, before it answers a call."""
    for index in range(process.count):
        if index == process.index:
            continue
        try:
            answer = await process.ask(index, write_request("GET", STATE, gate.trainer_key), limit_s=STATE_S)
        except SiblingSilent:
            continue
        if answer.status == 200:
            state = msgspec.json.decode(answer.body, type=TrainerState)
            gate.calls.policy_version, paused = state.policy_version, state.paused
            break
    else:
        _log.warning("no other process of the gate could say the policy's version, nor whether calls are paused")
        paused = False
    process.again = False
    if not paused:
        gate.calls.fair_queue.resume()


class JoinedOperator:
    """The admin's and the trainer's routes of a gate of several processes: each process is asked and the answers are joined."""

    def __init__(self, process: GateProcess, admin_key: str | None, trainer_key: str | None) -> None:
        self._process, self._admin_key, self._trainer_key = process, admin_key, trainer_key

    # -- the admin's

    async def create(self, request: Request) -> Response:
        wanted = await read_body(request, NewSession)
        rollout_id = wanted.session_id or self._process.new_rollout_id()
        body = msgspec.json.encode({**msgspec.json.decode(await request.body() or b"{}"), "session_id": rollout_id})
        host = request.headers.get("host", "")
        sent = write_request("POST", "/sessions", self._admin_key, body, host=host)
        return _pass_on(await self._process.ask(self._process.owner(rollout_id), sent))

    async def index(self, request: Request) -> Response:
        answers = await self._admin("GET", "/sessions")
        found = [one for answer in answers for one in msgspec.json.decode(answer.body)["sessions"]]
        return as_json({"sessions": sorted(found, key=lambda one: one["created_at"])})

    async def metrics(self, request: Request) -> Response:
        answers = await self._admin("GET", "/metrics")
        return Response(add_metrics([answer.body for answer in answers]), media_type=METRICS_TEXT)

    async def _admin(self, method: str, target: str) -> list[SiblingAnswer]:
        return _refuse_as_one(await self._process.ask_all(write_request(method, target, self._admin_key)))

    # -- the trainer's

    async def set_version(self, request: Request) -> Response:
        return _pass_on((await self._trainer("/policy_version", await request.body()))[0])

    async def pause(self, request: Request) -> Response:
        wait = read_number(request.query_params, "wait", 0, most=MAX_WAIT_S)
        answers = await self._trainer(f"/pause?wait={wait}", limit_s=wait + ANSWER_S)
        left: list[dict[str, Any]] = [msgspec.json.decode(answer.body) for answer in answers]
        return as_json({"paused": True, "in_flight": sum(one["in_flight"] for one in left)})

    async def resume(self, request: Request) -> Response:
        return _pass_on((await self._trainer("/resume"))[0])

    async def _trainer(self, target: str, body: bytes = b"", limit_s: float = ANSWER_S) -> list[SiblingAnswer]:
        request = write_request("POST", target, self._trainer_key, body)
        return _refuse_as_one(await self._process.ask_all(request, limit_s))


def _refuse_as_one(answers: list[SiblingAnswer]) -> list[SiblingAnswer]:
    """If one process refuses, the gate refuses."""
    for answer in answers:
        if answer.status != 200:
            raise OperatorRefused(answer.status, msgspec.json.decode(answer.body)["error"])
    return answers


def _pass_on(answer: SiblingAnswer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")
