"""A rollout's sandbox, and the way from it to the gate."""

from __future__ import annotations

import anyio

from rollyard.core.errors import SandboxUnavailable
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.gate import Session
from rollyard.runs.rollout.context import RolloutContext


async def open_sandbox(context: RolloutContext, spec: SandboxSpec, limit_s: float) -> Sandbox:
    try:
        with anyio.fail_after(limit_s):
            return await context.backend.open(spec)
    except TimeoutError as error:
        raise SandboxUnavailable(
            f"the sandbox did not open within limits.boot ({context.limits.boot:g} s)", hint="raise limits.boot"
        ) from error


async def prove_route(context: RolloutContext, sandbox: Sandbox, session: Session) -> str:
    """The gate's address as the agent sees it, proved to answer before the agent starts. It is the parent's, where the agent
    goes on from a session that knows it."""
    if context.plan.options.gate_url is not None:
        return context.plan.options.gate_url.rstrip("/")
    start = context.plan.start
    listener = await sandbox.listen(start.port if start is not None and context.plan.resumed else 0)
    await context.gate.serve(listener, session)
    context.gate.check(session)
    await context.provision.prove_route(sandbox, listener.port)
    return f"http://127.0.0.1:{listener.port}"
