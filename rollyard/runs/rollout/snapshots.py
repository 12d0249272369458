"""While a call of the agent's is held: its sandbox's files are kept, or made those of the parent that it branches off.

A held call is a quiet moment of the agent's, or soon one: an agent that writes its session late is waited for. Programs that it
left running go on: they are looked for, by comparing what runs with what ran at its first call, and named beside the snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from rollyard.core.call import Call
from rollyard.core.errors import Error
from rollyard.core.rollout import CallSnapshot
from rollyard.gate import Session
from rollyard.runs.rollout.context import Prepared, RolloutContext
from rollyard.runs.rollout.lay_over import lay_over
from rollyard.runs.rollout.programs import Process, find_new, list_programs, wait_until_idle


async def watch_calls(context: RolloutContext, prepared: Prepared) -> None:
    """Has the gate call back at each call, where there is something to do then."""
    plan, session = context.plan, prepared.opened.session
    if session is None:
        return
    start = None if plan.resumed else plan.start
    if plan.options.snapshot_every is None and start is None:
        return
    sandbox = prepared.opened.sandbox
    services = [] if plan.options.snapshot_every is None else await find_new(sandbox, prepared.running)
    session.before_answer = CallWatch(context, prepared, session, start, services)


class CallWatch:
    def __init__(
        self,
        context: RolloutContext,
        prepared: Prepared,
        session: Session,
        start: CallSnapshot | None,
        services: Sequence[str],
    ) -> None:
        self._context, self._prepared, self._session, self._start = context, prepared, session, start
        self._sandbox = prepared.opened.sandbox
        self._port = urlsplit(prepared.opened.root_url).port or 0
        self._services = services  # what the task's setup left running
        self._own: Mapping[Process, str] | None = None  # what runs when the agent makes its first call
        self._calls = 0

    async def __call__(self, call: Call, recorded: bool) -> None:
        number, every = self._calls, self._context.plan.options.snapshot_every
        self._calls += 1
        prefix = self._session.prefix
        if self._start is not None and prefix is not None and prefix.reached:
            start, self._start = self._start, None
            changed = await lay_over(self._context, self._prepared, start)
            if changed is not None:
                self._context.record.note(laid_over=len(changed))
                await self._context.stages.tell("snapshot.laid_over", call=call.id, changed=changed[:100])
        if every is None:
            return
        try:
            if self._own is None:
                self._own = await list_programs(self._sandbox)
            if number and number % every == 0 and not recorded:
                await self._take(call)
        except Error as error:  # the rollout is as good without
            await self._context.stages.tell("snapshot.failed", call=call.id, error=str(error))

    async def _take(self, call: Call) -> None:
        record, began = self._context.record, time.monotonic()
        resume = self._context.plan.agent.resume
        if resume is not None and resume.settle_s and not await wait_until_idle(self._sandbox, resume.settle_s):
            await self._context.stages.tell("snapshot.restless", call=call.id, settle_s=resume.settle_s)
        left = await find_new(self._sandbox, self._own or {})
        image = await self._sandbox.snapshot()
        kept = CallSnapshot(
            image=image,
            backend=self._context.backend.name,
            port=self._port,
            background=(*self._services, *left),
            took_s=round(time.monotonic() - began, 6),
        )
        record.note(snapshots={**record.rollout.snapshots, call.id: kept})
        await self._context.stages.tell("snapshot.taken", call=call.id, **msgspec.to_builtins(kept))
