"""`EnvSession`: one environment instance, one move at a time, with a deadline; it knows nothing of sockets or routes.

A move runs in a task of the session, not of the connection that asked: a lost socket does not undo half a step, and a
request that is sent again with the same id after a reattach gets the first one's answer instead of a second step. A move
that was cut short leaves the environment in between, so only `reset` is accepted after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.errors import Error as RollyardError
from rollyard.core.ids import new_id, secret
from rollyard.envs.env import RESERVED, Env
from rollyard.envs.journal import JournalRecord, SessionJournal
from rollyard.envs.metrics import EnvCounters
from rollyard.envs.results import EnvRefused, EnvResult, as_plain
from rollyard.envs.telemetry import Telemetry
from rollyard.tools.tool import ToolContext
from rollyard.tools.toolset import Toolset

_REMEMBERED = 64  # requests whose answer is given again when they are resent
CLOSE_S = 10.0
GYM = frozenset(("reset", "step", "state"))
MOVES = GYM | {"tools", "call"}
Heard = Callable[[str | None, float, float | None, str | None], None]


class SessionTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What client and server agreed on when the session opened. `gym=False` (production): no reset, step or state."""

    lease_s: float
    deadline_s: float
    gym: bool = True


class SessionObserver(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session tells what happens, and where it is kept."""

    counters: EnvCounters
    telemetry: Telemetry
    journal: SessionJournal | None = None


class EnvSession:
    """`lease` and `agent_key` are returned once, when it opens; only their hashes are kept. `left` is what a killed server's
    journal has of it."""

    def __init__(
        self,
        env: Env,
        terms: SessionTerms,
        watch: SessionObserver,
        *,
        left: JournalRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease, self.agent_key = secret("lease"), secret("agent")
        self.id = new_id("es") if left is None else left.session
        self.lease_hash = digest(self.lease) if left is None else left.lease
        self.agent_hash = digest(self.agent_key) if left is None else left.agent
        self.lease_s, self.deadline_s = terms.lease_s, terms.deadline_s
        self.attached = 0  # connections that hold it; an old one may be noticed dead after a new one came
        self.closed = False
        self.heard: Heard | None = None  # called with progress
        self._clock = clock
        self.used_at = clock()
        self.toolset = _toolset_of(env)
        self._env = env
        self._gym = terms.gym
        self._watch = watch
        self._episode_id = None if left is None else left.episode_id
        self._steps = 0 if left is None else left.steps
        self._broken = False
        self._running: asyncio.Task[Any] | None = None
        self._due = 0.0  # when the running move is out of time
        self._timer: asyncio.TimerHandle | None = None
        self._late = False
        self._leaving = False
        self._turn = asyncio.Lock()
        self._running_id: str | None = None
        self._moves: set[asyncio.Task[EnvResult]] = set()
        self._answered: OrderedDict[str, asyncio.Future[EnvResult]] = OrderedDict()
        env.report_progress = self._progress
        for request_id, kept in {} if left is None else left.answers.items():
            answer: asyncio.Future[EnvResult] = asyncio.get_running_loop().create_future()
            answer.set_result(EnvResult.replay(kept))
            self._answered[request_id] = answer

    @property
    def steps_tools(self) -> bool:
        """Whether a tool call that comes as an action is a step of the environment's own."""
        return self._env.counts_itself

    @property
    def live(self) -> bool:
        """A client is connected, or a move runs."""
        return self.attached > 0 or bool(self._moves)

    @property
    def expired(self) -> bool:
        return not self.live and self._clock() > self.used_at + self.lease_s

    def touch(self) -> None:
        self.used_at = self._clock()

    def holds(self, lease: str) -> bool:
        return compare_digest(self.lease_hash, digest(lease))

    def start_move(
        self,
        move: str,
        given: Mapping[str, Any],
        request_id: str | None = None,
        deliver: Callable[[EnvResult], None] | None = None,
    ) -> asyncio.Future[EnvResult]:
        """Start a move (reset, step, state, tools, call); one that was begun under this id is not run again. `deliver` gets
        the answer as soon as there is one."""
        self.used_at = self._clock()
        if self.closed:
            raise EnvRefused("SESSION_ERROR", "the session is closed")
        if move not in MOVES or (move in GYM and not self._gym):
            raise EnvRefused("UNKNOWN_TYPE", f"{move[:40]!r} is not offered")
        if request_id is not None and (begun := self._answered.get(request_id)) is not None:
            if deliver is not None:
                begun.add_done_callback(lambda done: deliver(done.result()))
            return begun
        task = asyncio.get_running_loop().create_task(self._run_and_deliver(move, given, request_id, deliver))
        self._moves.add(task)
        if request_id is not None:
            self._answered[request_id] = task
            while len(self._answered) > _REMEMBERED:
                self._answered.popitem(last=False)
        return task

    async def do(self, move: str, given: Mapping[str, Any], *, request_id: str | None = None) -> Any:
        """The move's answer as plain JSON values, or `EnvRefused`. A caller that stops waiting does not stop the move."""
        return (await asyncio.shield(self.start_move(move, given, request_id))).get()

    def forget(self, seen: Iterable[str]) -> None:
        """Answers that have arrived: these requests are not sent again."""
        for request_id in seen:
            answer = self._answered.get(request_id)
            if answer is not None and answer.done():
                del self._answered[request_id]

    def cancel(self) -> bool:
        """Cut the running move; it answers CANCELLED."""
        loop = asyncio.get_running_loop()
        for task in self._moves:
            loop.call_soon(task.cancel)  # one that was begun in this very moment starts first, so that it can answer
        return bool(self._moves)

    async def restore(self, saved: Any) -> None:
        async with asyncio.timeout(self.deadline_s):
            await self._env.restore(saved)

    async def aclose(self, *, leave: bool = False) -> None:
        """Safe to call twice; the environment's own close has ten seconds. `leave` what is kept of it for the next server."""
        if self.closed:
            return
        self.closed = True
        self._leaving = leave
        self.cancel()
        if self._watch.journal is not None and not leave:
            self._watch.journal.drop(self.id)
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._moves:
                    await asyncio.wait(set(self._moves))
                await self._env.close()
        except Exception as error:  # noqa: BLE001 - author's code; the slot must be freed whatever it does
            self._watch.telemetry.fail("env.session.closed", error, session=self.id)
        if self._timer is not None:
            self._timer.cancel()
        await self.toolset.aclose()

    async def _run_and_deliver(
        self,
        move: str,
        given: Mapping[str, Any],
        request_id: str | None,
        deliver: Callable[[EnvResult], None] | None,
    ) -> EnvResult:
        try:
            answer = await self._run_in_turn(move, given, request_id)
        finally:
            self._moves.discard(asyncio.current_task())  # pyright: ignore[reportArgumentType] - this is that task
            self.used_at = self._clock()
        if deliver is not None:
            deliver(answer)
        return answer

    async def _run_in_turn(self, move: str, given: Mapping[str, Any], request_id: str | None) -> EnvResult:
        watch = self._watch
        try:
            async with self._turn:
                self._running_id = request_id
                began = time.perf_counter()
                with watch.telemetry.span(f"env.{move}", session=self.id, episode=self._episode_id) as span:
                    answer = await self._run_until_deadline(move, given)
                    span.mark_found(code=answer.code, step=self._steps)
                watch.counters.count_move(move, answer.code, time.perf_counter() - began)
        except asyncio.CancelledError:
            # the session's own cancel(): this task has no other owner, so the cancellation ends here as an answer
            self._broken = True
            answer = EnvResult(error=EnvRefused("CANCELLED", f"{move} was cancelled"))
            watch.counters.count_move(move, "CANCELLED", 0.0)
        if watch.journal is not None and move not in ("state", "tools"):
            self._keep(watch.journal, request_id, answer)
        return answer

    async def _run_until_deadline(self, move: str, given: Mapping[str, Any]) -> EnvResult:
        task = asyncio.current_task()
        assert task is not None
        self._start_clock(task)
        try:
            if self._broken and move != "reset":
                raise EnvRefused("SESSION_ERROR", "the episode was cut short: reset")
            return EnvResult.of(await self._dispatch(move, given))
        except asyncio.CancelledError:
            if not self._late or task.uncancel() > 0:
                raise  # another task's cancellation
            self._broken = True
            return EnvResult(error=EnvRefused("DEADLINE", f"{move} took longer than {self.deadline_s:g} s"))
        except EnvRefused as error:
            return EnvResult(error=error)
        except RollyardError as error:
            return EnvResult(error=EnvRefused("EXECUTION_ERROR", error.message))
        except Exception as error:  # noqa: BLE001 - author's code: the client gets an id, the log the rest
            incident = new_id("err")
            self._watch.telemetry.fail(f"env.{move}", error, session=self.id, incident=incident)
            return EnvResult(error=EnvRefused("EXECUTION_ERROR", f"{move} failed ({incident})"))
        finally:
            self._running = None

    def _start_clock(self, task: asyncio.Task[Any]) -> None:
        """Moves are many, one at a time, and nearly all end early: one timer outlives them and looks at the move it finds."""
        loop = asyncio.get_running_loop()
        self._late, self._running, self._due = False, task, loop.time() + self.deadline_s
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._running is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._check_deadline)
        else:
            self._late = True
            self._running.cancel()

    async def _dispatch(self, move: str, given: Mapping[str, Any]) -> Any:
        if move == "step":
            return await self._step_env(given.get("action"))
        if move == "reset":
            return await self._reset_env(given)
        if move == "state":
            own = msgspec.to_builtins(dict(self._env.state), str_keys=True)
            counted = {"episode_id": self._episode_id, "step_count": self._steps}
            return counted | own if self._env.counts_itself else own | counted
        if move == "tools":
            return [
                {"name": t.name, "description": t.description, "input_schema": msgspec.to_builtins(dict(t.schema))}
                for t in self.toolset.tools.values()
            ]
        return await self._call_tool(given)

    async def _reset_env(self, given: Mapping[str, Any]) -> Any:
        seed, options, episode = given.get("seed"), given.get("options") or {}, given.get("episode_id")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise EnvRefused("VALIDATION_ERROR", "seed must be an integer of at least 0")
        if not isinstance(options, dict):
            raise EnvRefused("VALIDATION_ERROR", "options must be an object")
        if episode is not None and (not isinstance(episode, str) or len(episode) > 255):
            raise EnvRefused("VALIDATION_ERROR", "episode_id must be a string of at most 255 characters")
        if self._env.counts_itself and episode is not None:
            options = {**options, "episode_id": episode}
        result = await self._env.reset(seed=seed, options=options)
        self._episode_id, self._steps, self._broken = episode or new_id("ep"), 0, False
        return as_plain(result)

    async def _step_env(self, action: Any) -> Any:
        try:
            action = msgspec.convert(action, type(self._env).action)
        except msgspec.ValidationError as error:
            raise EnvRefused("VALIDATION_ERROR", f"action: {error}") from error
        result = as_plain(await self._env.step(action))
        self._steps += 1
        return result

    async def _call_tool(self, given: Mapping[str, Any]) -> Any:
        name, arguments = given.get("name"), given.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise EnvRefused("VALIDATION_ERROR", "a call has a name and an object of arguments")
        known = name in self.toolset.tools
        context = ToolContext(rollout_id=self.id, progress=self._progress)
        if given.get("counts"):  # OpenEnv's step(CallToolAction): it is a step there
            self._steps += 1
        value, failed = await self.toolset.call(name, arguments, context)
        return {"value": msgspec.to_builtins(value, str_keys=True), "failed": failed, "known": known}

    async def _progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        if self.heard is not None:
            self.heard(self._running_id, done, total, message)

    def _keep(self, journal: SessionJournal, request_id: str | None, answer: EnvResult) -> None:
        """A session that cannot be put back is not kept: then it is lost with its server, and its client gets an error."""
        if self._leaving:
            return  # what is kept stands: a move that the shutdown cut off is sent again
        try:
            saved = None if self._broken or self.closed else self._env.save()
            if saved is None:
                journal.drop(self.id)
                return
            given = {i: a.result() for i, a in self._answered.items() if a.done() and not a.cancelled()}
            if request_id is not None:
                given[request_id] = answer
            journal.keep(
                JournalRecord(
                    session=self.id,
                    lease=self.lease_hash,
                    agent=self.agent_hash,
                    lease_s=self.lease_s,
                    deadline_s=self.deadline_s,
                    episode_id=self._episode_id,
                    steps=self._steps,
                    saved=EnvResult.of(msgspec.to_builtins(saved, str_keys=True)).value,
                    answers={i: a.kept for i, a in given.items()},
                )
            )
        except Exception as error:  # noqa: BLE001 - author's code or a full disk: the episode goes on, unkept
            journal.drop(self.id)
            self._watch.telemetry.fail("env.session.restored", error, session=self.id)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _toolset_of(env: Env) -> Toolset:
    tools = list(env.tools())
    if taken := [t.name for t in tools if t.name in RESERVED]:
        raise ConfigError(f"a tool cannot be named {', '.join(taken)}: that is the environment's own verb")
    return Toolset(tools, name=type(env).__name__)
