"""Agents of one kind that wait for a model: some rollouts, each held at a model call, so that what they hold can be measured."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from rollyard.core.agent import Agent
from rollyard.core.call import Call, Reply
from rollyard.core.errors import AgentError
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Policy, Sandbox
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.policy import scripted
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.run.run import Run
from rollyard.store import Store

START_S = 300.0  # for all of them to be installed and to make their first call
_NEXT_S = 60.0
_LIMITS = Limits(boot=START_S, agent=3600.0)  # of a machine that is as full as it gets
# some agents take the same command again and again for a loop, and end
_SCRIPT = {"steps": [*({"shell": f"true {number}"} for number in range(24)), {"text": "done"}]}


class HoldingPolicy:
    """Answers as another policy does, but a call of the agent's own only when told to."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[str, list[anyio.Event]] = {}  # by rollout; an agent may make several calls at once
        self._changed = anyio.Event()

    async def __call__(self, call: Call) -> Reply:
        if call.kind == "agent":
            answered = anyio.Event()
            self._held.setdefault(call.rollout_id, []).append(answered)
            self._changed.set()
            self._changed = anyio.Event()
            await answered.wait()
        return await self._policy(call)

    async def wait(self, count: int) -> None:
        """Until so many rollouts are held."""
        while len(self._held) < count:
            await self._changed.wait()

    async def answer(self, rollout_id: str) -> float:
        """What one rollout asked; gives the seconds until its next call is held."""
        began = time.monotonic()
        for answered in self._held.pop(rollout_id):
            answered.set()
        with anyio.move_on_after(_NEXT_S) as scope:
            while rollout_id not in self._held:
                await self._changed.wait()
        if scope.cancelled_caught:
            raise AgentError(f"it made no further model call within {_NEXT_S:g} s of an answer")
        return time.monotonic() - began

    async def closed(self, rollout_id: str) -> None:
        self._held.pop(rollout_id, None)
        await self._policy.closed(rollout_id)

    async def aclose(self) -> None:
        await self._policy.aclose()


@asynccontextmanager
async def hold_agents(
    place: Backend, agent: Agent, count: int
) -> AsyncGenerator[tuple[HoldingPolicy, Mapping[str, Sandbox]]]:
    """The policy that holds them, and their sandboxes by rollout. Leaving the block ends them."""
    boxes: dict[str, Sandbox] = {}
    policy = HoldingPolicy(scripted(_SCRIPT))

    async def keep(sandbox: Sandbox, rollout: Rollout) -> None:
        boxes[rollout.id] = sandbox

    with tempfile.TemporaryDirectory(prefix="rollyard-held-") as folder:
        async with (
            Store.open(Path(folder) / "runs.db") as store,
            Gate(policy, log=store) as gate,
            Run(
                [Task(id="hold", instruction="Run the command `true`.")],
                agent=agent, attempts=count, parallel=count, retries=0, sandbox=place, gate=gate, store=store, limits=_LIMITS,
                hooks=Hooks(after_setup=(keep,)),
            ) as run,
        ):  # fmt: skip
            await _start(run, policy, count)
            yield policy, boxes


async def _start(run: Run, policy: HoldingPolicy, count: int) -> None:
    """All of them held, or an error with what became of the first that ended before."""
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            async for done in run:
                why = done.failure.message if done.failure is not None else "it made no call"
                raise AgentError(f"it ended before its first model call: {why}")

        group.start_soon(watch)
        with anyio.move_on_after(START_S) as scope:
            await policy.wait(count)
        if scope.cancelled_caught:
            raise AgentError(f"it made no model call within {START_S:g} s")
        group.cancel_scope.cancel()
