"""`Session`: one environment instance, one move at a time, with a deadline; it knows nothing of sockets or routes.

A move runs in a task of the session, not of the connection that asked: a lost socket does not undo half a step, and a
request that is sent again with the same id after a reattach gets the first one's answer instead of a second step. A move
that was cut short leaves the environment in between, so only `reset` is accepted after it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.errors import Error as RollyardError
from rollyard.core.ids import new_id, secret
from rollyard.envs.env import RESERVED, Env, StepResult
from rollyard.tools.tool import ToolContext
from rollyard.tools.toolset import Toolset

_log = logging.getLogger("rollyard.envs")
_REMEMBERED = 64  # requests whose answer is given again when they are resent
_CLOSE_S = 10.0
GYM = frozenset(("reset", "step", "state"))


class Refused(EnvError):
    """An answer of no; `code` is the word that both wires carry."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answer(msgspec.Struct, frozen=True):
    """What a move came to; exactly one of the two is set."""

    value: Any = None
    error: Refused | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Session:
    """`gym=False` (production) has no reset, step or state for anybody."""

    def __init__(self, env: Env, *, lease_s: float, deadline_s: float, gym: bool = True) -> None:
        self.id = new_id("es")
        self.lease = secret("lease")
        self.agent_key = secret("agent")
        self.lease_s = lease_s
        self.deadline_s = deadline_s
        self.attached = 0  # connections that hold it; an old one may be noticed dead after a new one came
        self.closed = False
        self.used_at = time.monotonic()
        self.toolset = _toolset_of(env)
        self._env = env
        self._gym = gym
        self._episode_id: str | None = None
        self._steps = 0
        self._broken = False
        self._turn = asyncio.Lock()
        self._moves: set[asyncio.Task[Answer]] = set()
        self._answered: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()

    @property
    def live(self) -> bool:
        """Somebody is connected, or something runs."""
        return self.attached > 0 or bool(self._moves)

    @property
    def expired(self) -> bool:
        return not self.live and time.monotonic() > self.used_at + self.lease_s

    def used(self) -> None:
        self.used_at = time.monotonic()

    async def do(self, move: str, given: Mapping[str, Any], *, request_id: str | None = None) -> Any:
        """Run a move (reset, step, state, tools, call) and return plain JSON values, or raise `Refused`."""
        self.used()
        if self.closed:
            raise Refused("SESSION_ERROR", "the session is closed")
        if request_id is not None and request_id in self._answered:
            return (await asyncio.shield(self._answered[request_id])).get()
        task = asyncio.get_running_loop().create_task(self._move(move, given))
        self._moves.add(task)
        task.add_done_callback(self._moved)
        if request_id is not None:
            self._answered[request_id] = task
            while len(self._answered) > _REMEMBERED:
                self._answered.popitem(last=False)
        return (await asyncio.shield(task)).get()

    def cancel(self) -> bool:
        """Cut the running move; it answers CANCELLED."""
        for task in self._moves:
            task.cancel()
        return bool(self._moves)

    async def aclose(self) -> None:
        """Safe to call twice; the environment's own close has ten seconds."""
        if self.closed:
            return
        self.closed = True
        self.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                if self._moves:
                    await asyncio.wait(set(self._moves))
                await self._env.close()
        except Exception as error:  # noqa: BLE001 - author's code; the slot must be freed whatever it does
            _log.error("session=%s close failed", self.id, exc_info=error)
        await self.toolset.aclose()

    def _moved(self, task: asyncio.Task[Answer]) -> None:
        self._moves.discard(task)
        self.used()

    async def _move(self, move: str, given: Mapping[str, Any]) -> Answer:
        try:
            async with self._turn:
                if move in GYM and not self._gym:
                    raise Refused("UNKNOWN_TYPE", f"{move} is not offered")
                if self._broken and move != "reset":
                    raise Refused("SESSION_ERROR", "the episode was cut short: reset")
                return Answer(value=await self._bounded(move, given))
        except Refused as error:
            return Answer(error=error)
        except asyncio.CancelledError:
            # the session's own cancel(): nobody else holds this task, so the cancellation ends here as an answer
            self._broken = True
            return Answer(error=Refused("CANCELLED", f"{move} was cancelled"))

    async def _bounded(self, move: str, given: Mapping[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self.deadline_s):
                return finite(await self._run(move, given))
        except TimeoutError as error:
            self._broken = True
            raise Refused("DEADLINE", f"{move} took longer than {self.deadline_s:g} s") from error
        except Refused:
            raise
        except RollyardError as error:
            raise Refused("EXECUTION_ERROR", error.message) from error
        except Exception as error:  # an environment's own bug: logged, and told by its id alone
            incident = new_id("err")
            _log.error("%s session=%s %s failed", incident, self.id, move, exc_info=error)
            raise Refused("EXECUTION_ERROR", f"{move} failed ({incident})") from error

    async def _run(self, move: str, given: Mapping[str, Any]) -> Any:
        if move == "reset":
            return await self._reset(given)
        if move == "step":
            return await self._step(given.get("action"))
        if move == "state":
            own = msgspec.to_builtins(dict(self._env.state))
            return own | {"episode_id": self._episode_id, "step_count": self._steps}
        if move == "tools":
            return [
                {"name": t.name, "description": t.description, "input_schema": msgspec.to_builtins(dict(t.schema))}
                for t in self.toolset.tools.values()
            ]
        if move == "call":
            return await self._call(given)
        raise Refused("UNKNOWN_TYPE", f"there is no {move!r}")

    async def _reset(self, given: Mapping[str, Any]) -> Any:
        seed, options, episode = given.get("seed"), given.get("options") or {}, given.get("episode_id")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise Refused("VALIDATION_ERROR", "seed must be an integer of at least 0")
        if not isinstance(options, dict):
            raise Refused("VALIDATION_ERROR", "options must be an object")
        if episode is not None and (not isinstance(episode, str) or len(episode) > 255):
            raise Refused("VALIDATION_ERROR", "episode_id must be a string of at most 255 characters")
        result = await self._env.reset(seed=seed, options=options)
        self._episode_id, self._steps, self._broken = episode or new_id("ep"), 0, False
        return plain(result)

    async def _step(self, action: Any) -> Any:
        try:
            action = msgspec.convert(action, type(self._env).action)
        except msgspec.ValidationError as error:
            raise Refused("VALIDATION_ERROR", f"action: {error}") from error
        result = plain(await self._env.step(action))
        self._steps += 1
        return result

    async def _call(self, given: Mapping[str, Any]) -> Any:
        name, arguments = given.get("name"), given.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise Refused("VALIDATION_ERROR", "a call has a name and an object of arguments")
        known = name in self.toolset.tools
        value, failed = await self.toolset.call(name, arguments, ToolContext(rollout_id=self.id))
        return {"value": msgspec.to_builtins(value), "failed": failed, "known": known}


def plain(result: StepResult) -> dict[str, Any]:
    """As JSON values. A reward that is no number is an error here, never a null on the wire."""
    if result.reward is not None and not math.isfinite(result.reward):
        raise Refused("EXECUTION_ERROR", f"the environment's reward is {result.reward}, which is no reward")
    return msgspec.to_builtins(result)


def finite(value: Any) -> Any:
    """The value itself, if JSON can carry it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Refused("EXECUTION_ERROR", f"the environment's answer is not JSON: {error}") from error
    return value


def _toolset_of(env: Env) -> Toolset:
    tools = list(env.tools())
    if taken := [t.name for t in tools if t.name in RESERVED]:
        raise ConfigError(f"a tool cannot be named {', '.join(taken)}: that is the environment's own verb")
    return Toolset(tools, name=type(env).__name__)
