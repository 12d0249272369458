"""The agent's way to its model, where it is not the gate's own listener: proved from inside the sandbox before the agent starts.

`gate_url` must lead to this rollout's session. `direct` must lead to a model that answers one token; since the gate does not see
the agent's calls there, the same is asked again from the host when the agent has ended. That second question is not asked
inside: an agent could answer it there.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec

from rollyard.core.call import Dialect, Sampling
from rollyard.core.errors import GateUnreachable, PolicyError, UpstreamError
from rollyard.core.protocols import Sandbox
from rollyard.gate import Session
from rollyard.gate.refusals import AGENTS_OWN
from rollyard.policy.connection import ModelConnection, Timeouts
from rollyard.policy.upstream_policy import headers_of, hello
from rollyard.runs.rollout.context import OpenedSandbox, RolloutContext
from rollyard.sandbox.relay.program import FIND
from rollyard.wire import CODECS

_MOST_S = 60.0
_TOOL_S = 10.0  # beyond the request's own limit, for a program to start


class _Answer(NamedTuple):
    status: int  # 0 where there was none
    body: bytes


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    url: str
    headers: dict[str, str]
    body: str = ""
    limit_s: float


async def check_route(context: RolloutContext, opened: OpenedSandbox) -> bool:
    """Raise before the agent starts unless its model can be reached from where it will run. Gives whether a direct agent's
    model is to be asked again from here when the agent has ended."""
    if context.plan.direct is not None:
        await _check_direct(context, opened)
        return await _can_connect(context.plan.direct[0])
    if opened.session is not None and context.plan.options.gate_url is not None:
        await _check_gate_url(context, opened, opened.session)
    return False


async def find_direct_outage(context: RolloutContext) -> PolicyError | None:
    """Why the model of a direct agent does not answer now; None when it does."""
    assert context.plan.direct is not None
    request, secret = _one_token(context), context.plan.direct[1]
    connection = ModelConnection(timeouts=Timeouts(total=request.limit_s), secrets=(secret,))
    try:
        answer = _Answer(200, await connection.post(request.url, request.body.encode(), request.headers))
        return _why_not(context, request, connection, answer)
    except UpstreamError as error:
        return None if error.status in AGENTS_OWN else _failure(error.message, error.status)
    finally:
        await connection.aclose()


async def _check_direct(context: RolloutContext, opened: OpenedSandbox) -> None:
    assert context.plan.direct is not None
    request = _one_token(context)
    answer = await _ask(opened.sandbox, request)
    if answer is None:
        await context.stages.tell("route.unproved", url=request.url, why="no python3 and no node in the sandbox")
        return
    connection = ModelConnection(secrets=(context.plan.direct[1],))
    try:
        if (failed := _why_not(context, request, connection, answer)) is not None:
            raise failed
    finally:
        await connection.aclose()


async def _can_connect(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with anyio.fail_after(_TOOL_S):
            await (await anyio.connect_tcp(parts.hostname or "", port)).aclose()
    except (OSError, TimeoutError):
        return False
    return True


async def _check_gate_url(context: RolloutContext, opened: OpenedSandbox, session: Session) -> None:
    session.reached = False
    limit_s = min(_MOST_S, context.limits.boot)
    headers = {"authorization": f"Bearer {session.key}"}
    request = _Request(method="GET", url=f"{opened.root_url}/mcp", headers=headers, limit_s=limit_s)
    answer = await _ask(opened.sandbox, request)
    if answer is None:
        await context.stages.tell("route.unproved", url=opened.root_url, why="no python3 and no node in the sandbox")
        return
    if not session.reached:
        said = answer.body[:200].decode("utf-8", "replace")
        raise GateUnreachable(
            f"gate_url {opened.root_url} does not lead from the sandbox to this rollout's gate: "
            f"{f'it answered {answer.status}' if answer.status else 'no answer'} ({said})",
            hint="is the gate listening there, and does the task's network allow it?",
        )


def _one_token(context: RolloutContext) -> _Request:
    assert context.plan.direct is not None
    url, key = context.plan.direct
    dialect: Dialect = context.plan.options.dialect or context.plan.agent.dialect or "chat"
    codec, model = CODECS[dialect], context.plan.model
    root = url.removesuffix("/").removesuffix("/v1")
    path = codec.upstream_path.format(model=model)
    body = codec.encode_request(hello(model), model=model, sampling=Sampling(max_tokens=1), extra={})
    return _Request(
        method="POST",
        url=f"{root}/{'v1beta' if dialect == 'gemini' else 'v1'}{path}",
        headers=headers_of(codec, key),
        body=body.decode(),
        limit_s=min(_MOST_S, context.limits.agent),
    )


def _why_not(
    context: RolloutContext, request: _Request, connection: ModelConnection, answer: _Answer
) -> PolicyError | None:
    if not answer.status:
        words = answer.body[:2000].decode("utf-8", "replace")
        return _failure(f"no answer from {request.url} inside the sandbox ({words})", 502)
    if answer.status >= 300:
        if answer.status in AGENTS_OWN:  # it is there, and does not like this question
            return None
        return _failure(connection.refusal(request.url, answer.status, answer.body).message, answer.status)
    dialect = context.plan.options.dialect or context.plan.agent.dialect or "chat"
    try:
        CODECS[dialect].decode_reply(answer.body)
    except (PolicyError, msgspec.MsgspecError, ValueError, KeyError, TypeError):
        return _failure(f"the answer of {request.url} is not a {dialect} reply", 502)
    return None


def _failure(message: str, status: int) -> UpstreamError:
    return UpstreamError(f"the model's answers failed: {message}", status=status)


async def _ask(sandbox: Sandbox, request: _Request) -> _Answer | None:
    """The answer as a program in the sandbox gets it; None where nothing there can ask."""
    found = await sandbox.exec(FIND, timeout=_TOOL_S)
    if not found.ok:
        return None
    path = found.stdout.split(b"\n")[0].decode()
    name, flags = ("http_probe.js", ["-e"]) if path.endswith("node") else ("http_probe.py", ["-I", "-c"])
    script = await anyio.to_thread.run_sync(resources.files("rollyard.inside").joinpath(name).read_text)
    program = [path, *flags, script]
    done = await sandbox.exec(program, stdin=msgspec.json.encode(request), timeout=request.limit_s + _TOOL_S)
    status, _, body = done.stdout.partition(b"\n")
    if done.timed_out or not status.isdigit():
        why = b"no answer in time" if done.timed_out else done.stderr[-2000:]
        return _Answer(0, why)
    return _Answer(int(status), body)
