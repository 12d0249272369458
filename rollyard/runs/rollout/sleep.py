"""`sleep_after`: an agent whose model calls are all held for so long sleeps. Its memory goes to the machine's swap, and it is
woken before its answer is written.

It sits between the gate and the policy, so the answer is there and the agent is awake before the gate writes it. An agent that
keeps running while it waits fetches its memory back: one that declares `freeze_s` is frozen, for at most that long, since frozen
it reads no sign of life either. What it left running in the background is frozen with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import anyio

from rollyard.core.call import Call, Reply
from rollyard.core.errors import Error
from rollyard.core.protocols import Policy, Sleeps
from rollyard.runs.rollout.context import Prepared, RolloutContext
from rollyard.runs.rollout.stages import Stages

WAKE_S = 30.0


def let_sleep(context: RolloutContext, prepared: Prepared) -> None:
    after, session, sandbox = context.plan.options.sleep_after, prepared.opened.session, prepared.opened.sandbox
    if after is not None and session is not None and isinstance(sandbox, Sleeps):
        agent = context.plan.agent
        session.policy = SleepingPolicy(session.policy, sandbox, context.stages, after, agent.freeze_s)


class SleepingPolicy:
    """The rollout's policy, with the agent asleep while it takes long."""

    def __init__(self, policy: Policy, sandbox: Sleeps, stages: Stages, after_s: float, freeze_s: float) -> None:
        self._policy, self._sandbox, self._stages = policy, sandbox, stages
        self._after_s, self._freeze_s = after_s, freeze_s
        self._waiting = 0  # calls that are held
        self._sleeping: asyncio.Task[None] | None = None
        self._waking = asyncio.Lock()

    async def __call__(self, call: Call) -> Reply:
        await self._wake()
        self._waiting += 1
        self._sleep_later()
        try:
            return await self._policy(call)
        finally:
            self._waiting -= 1
            await self._wake()
            if self._waiting:
                self._sleep_later()

    @property
    def count_tokens(self) -> Any:
        """The policy's own, where it counts tokens."""
        return getattr(self._policy, "count_tokens", None)

    @property
    def version(self) -> int | None:
        """The policy's own, where it says which version it is."""
        return getattr(self._policy, "version", None)

    async def closed(self, rollout_id: str) -> None:
        await self._wake()
        await self._policy.closed(rollout_id)

    async def aclose(self) -> None:
        await self._policy.aclose()

    def _sleep_later(self) -> None:
        self._sleeping = asyncio.get_running_loop().create_task(self._sleep())

    async def _sleep(self) -> None:
        """Sleep until cancelled, or until the agent was frozen for as long as it may be."""
        await asyncio.sleep(self._after_s)
        try:
            await self._sandbox.put_to_sleep(freeze=self._freeze_s > 0)
            await self._stages.tell("agent.asleep", frozen=self._freeze_s > 0)
            await asyncio.sleep(self._freeze_s or float("inf"))
        except Error as error:  # it is as good awake, and a sandbox that is gone is found out by others
            await self._stages.tell("agent.not_asleep", error=str(error))
        finally:
            with anyio.CancelScope(shield=True), suppress(Error, TimeoutError):
                with anyio.fail_after(WAKE_S):
                    await self._sandbox.wake()

    async def _wake(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._waking:  # an answer that comes with another one waits for the agent too
                sleeping, self._sleeping = self._sleeping, None
                if sleeping is not None:
                    sleeping.cancel()
                    await asyncio.wait([sleeping])
