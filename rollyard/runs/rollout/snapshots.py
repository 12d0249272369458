"""While a call of the agent's is held: its sandbox's files are kept, or made those of the parent that it branches off.

A held call is a quiet moment of the agent's. Programs that it left running go on: they are looked for, by comparing what runs
with what ran at its first call, and named beside the snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from rollyard.core.call import Call
from rollyard.core.errors import Error, SandboxError
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import CallSnapshot
from rollyard.gate import Session
from rollyard.runs.rollout.context import Prepared, RolloutContext
from rollyard.runs.rollout.lay_over import lay_over

Process = tuple[int, str]  # its number, and when it was started
_LIST = 'for p in /proc/[0-9]*; do read -r line 2>/dev/null < "$p/stat" && echo "$line"; done; echo "$$"'
_LIST_S = 30.0


async def watch_calls(context: RolloutContext, prepared: Prepared) -> None:
    """Has the gate call back at each call, where there is something to do then."""
    plan, session = context.plan, prepared.opened.session
    if session is None:
        return
    start = None if plan.resumed else plan.start
    if plan.options.snapshot_every is None and start is None:
        return
    sandbox = prepared.opened.sandbox
    services = await list_programs(sandbox) if plan.options.snapshot_every is not None else {}
    session.before_answer = CallWatch(context, prepared, session, start, services)


class CallWatch:
    def __init__(
        self,
        context: RolloutContext,
        prepared: Prepared,
        session: Session,
        start: CallSnapshot | None,
        services: Mapping[Process, str],
    ) -> None:
        self._context, self._prepared, self._session, self._start = context, prepared, session, start
        self._sandbox = prepared.opened.sandbox
        self._port = urlsplit(prepared.opened.root_url).port or 0
        self._services = services
        self._own: Mapping[Process, str] | None = None  # what runs when the agent makes its first call
        self._calls = 0

    async def __call__(self, call: Call, recorded: bool) -> None:
        number, every = self._calls, self._context.plan.options.snapshot_every
        self._calls += 1
        prefix = self._session.prefix
        if self._start is not None and prefix is not None and prefix.reached:
            start, self._start = self._start, None
            changed = await lay_over(self._context, self._prepared, start)
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
        running = await list_programs(self._sandbox)
        known = self._own or {}
        left = [*self._services.values(), *(name for one, name in running.items() if one not in known)]
        image = await self._sandbox.snapshot()
        kept = CallSnapshot(
            image=image,
            backend=self._context.backend.name,
            port=self._port,
            background=tuple(left),
            took_s=round(time.monotonic() - began, 6),
        )
        record.note(snapshots={**record.rollout.snapshots, call.id: kept})
        await self._context.stages.tell("snapshot.taken", call=call.id, **msgspec.to_builtins(kept))


async def list_programs(sandbox: Sandbox) -> dict[Process, str]:
    """What runs in a sandbox by name, without those that are there to look."""
    done = await sandbox.exec(_LIST, timeout=_LIST_S)
    *lines, own = done.stdout.decode("utf-8", "replace").split("\n")[:-1] or [""]
    found: dict[int, tuple[int, str, str, str]] = {}
    for line in lines:
        head, _, rest = line.rpartition(")")
        number, _, name = head.partition(" (")
        fields = rest.split()
        if number.isdigit() and len(fields) > 19:
            found[int(number)] = (int(fields[1]), name, fields[0], fields[19])
    if not own.isdigit():
        raise SandboxError("the sandbox does not tell what runs in it", hint="its image needs /bin/sh, and /proc")
    looking = int(own)
    while looking > 1 and looking in found:
        looking = found.pop(looking)[0]
    return {(number, begun): name for number, (_, name, state, begun) in found.items() if state != "Z" and number > 1}
