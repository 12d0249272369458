"""While the agent runs: its output becomes events as it comes, and a watchdog tells a parked agent from a slow model.

What counts as parked is `agents.watchdog`'s to say; this looks, and ends what it says is over. An agent whose process lingers
after its own final event is given a short grace. Why it ended is part of the result; nothing here judges it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

import anyio
import msgspec

from rollyard.agents import ActivitySample, Watchdog
from rollyard.core.errors import SandboxInterrupted
from rollyard.core.events import AgentEvent
from rollyard.core.protocols import Job
from rollyard.core.sandbox import Exit
from rollyard.runs.rollout.agent_log import AgentLog
from rollyard.runs.rollout.kept_events import KeptEvents
from rollyard.runs.rollout.stages import Stages

LINGER_S = 3.0
TICK_S = 0.5
_FRESH = 0.05  # of the idle limit: so long after a sign of life the agent is not suspected of being parked
_REST = 20  # times as long as its sandbox took to answer, an agent is left alone: thousands may be asked on one machine


EndedHow = Literal["exited", "lingered", "parked", "stale", "diverged"]


class Activity(Protocol):
    """What the watchdog asks the gate's session."""

    @property
    def in_flight(self) -> int: ...
    @property
    def last_activity(self) -> float: ...


class OutputLines(Protocol):
    """Turns raw output into events; `close` gives what an unfinished last line held."""

    def feed(self, data: bytes) -> list[AgentEvent]: ...
    def close(self) -> list[AgentEvent]: ...


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    how: EndedHow
    exit_code: int | None
    events: tuple[AgentEvent, ...]

    @property
    def done(self) -> AgentEvent | None:
        """The agent's own last word on how it went."""
        return next((event for event in reversed(self.events) if event.kind == "done"), None)


class AgentMonitor:
    """One watch over one job. `events` and `log` hold what was seen, also when the wait is cut short."""

    def __init__(
        self,
        job: Job,
        lines: OutputLines,
        activity: Activity | None,
        idle_s: float,
        stages: Stages,
        log: AgentLog | None = None,
        find_end: Callable[[], EndedHow | None] = lambda: None,
    ) -> None:
        self._find_end = find_end
        self._job, self._lines, self._activity = job, lines, activity
        self._idle_s, self._stages = idle_s, stages
        self.log = log or AgentLog()
        self._last_output = time.monotonic()
        self._done_at: float | None = None
        self._how: EndedHow = "exited"
        self.events = KeptEvents()

    async def wait(self) -> Ending:
        done: Exit | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._guard)
            async with anyio.create_task_group() as readers:
                readers.start_soon(self._read, self._job.stream(), True)
                readers.start_soon(self._read, self._job.stream(stderr=True), False)
                done = await self._job.wait()
                readers.cancel_scope.deadline = anyio.current_time() + LINGER_S
            group.cancel_scope.cancel()
        await self._take(self._lines.close())
        code = done.exit_code if done is not None and self._how in ("exited", "lingered") else None
        return Ending(how=self._how, exit_code=code, events=tuple(self.events))

    async def _read(self, chunks: AsyncIterator[tuple[int, bytes]], is_output: bool) -> None:
        async for _, data in chunks:
            self._last_output = time.monotonic()
            self.log.add(data)
            if is_output:
                await self._take(self._lines.feed(data))

    async def _take(self, events: list[AgentEvent]) -> None:
        for event in events:
            self.events.add(event)
            if event.kind == "raw":
                continue
            self._done_at = time.monotonic() if event.kind == "done" else None  # going on takes a `done` back
            if self.events.may_tell():
                await self._stages.tell(f"agent.{event.kind}", **msgspec.to_builtins(event))

    async def _guard(self) -> None:
        dog = Watchdog(idle_s=self._idle_s, linger_s=LINGER_S)
        pause = TICK_S
        while True:
            await anyio.sleep(pause)
            if (how := self._find_end()) is not None:
                await self._end(how)
                return
            in_flight = self._activity.in_flight if self._activity else 0
            last_call = self._activity.last_activity if self._activity else 0.0
            asked_at = time.monotonic()
            fresh = asked_at - max(self._last_output, last_call) < _FRESH * self._idle_s
            try:
                # with a call in flight it cannot be parked; asking would wake every sandbox twice a second for nothing
                cpu_s = None if in_flight or fresh else await self._job.cpu_s()
            except SandboxInterrupted:  # a machine that is too busy to answer says nothing about the agent
                continue
            finally:  # and is asked more rarely
                pause = max(TICK_S, min(_REST * (time.monotonic() - asked_at), self._idle_s / 4))
            sample = ActivitySample(
                at=time.monotonic(),
                in_flight=in_flight,
                last_output_at=self._last_output,
                last_call_at=last_call,
                cpu_s=cpu_s,
                looked=not fresh,
                done_at=self._done_at,
            )
            state = dog.see(sample)
            if state == "parked":
                await self._end("parked")
                return
            if state == "lingering":
                await self._end("lingered")
                return

    async def _end(self, how: EndedHow) -> None:
        self._how = how
        await self._stages.tell("agent.ended", how=how)
        await self._job.kill()
