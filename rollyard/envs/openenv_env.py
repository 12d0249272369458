"""An environment written for OpenEnv behind our server: `adopt(EchoEnvironment, CallToolAction)` is a class to serve.

    # my_env.py
    from envs.echo_env.server.echo_environment import EchoEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction
    from rollyard.envs.openenv_env import adopt

    Echo = adopt(EchoEnvironment, CallToolAction)    # rollyard serve env my_env.py:Echo

A server of its author's own changes one import: `create_app` takes what OpenEnv's takes and gives our server.

Its blocking methods run in one thread of the session's own, as OpenEnv's server runs them; what it writes as async is awaited.
Tools of an `MCPEnvironment` are its tools here, over real MCP too. The package is imported when an environment is made.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import ConfigError
from rollyard.core.message import ToolSpec
from rollyard.envs.env import Env, StepResult
from rollyard.envs.results import EnvRefused
from rollyard.tools.answers import ToolAnswer, read
from rollyard.tools.bridge import bridge
from rollyard.tools.tool import Tool

TOOL_S = 600.0


def adopt(
    make: Callable[[], Any],
    action: type[Any],
    observation: type[Any] | None = None,
    *,
    max_sessions: int | None = None,
) -> type[Env]:
    """`make` gives an OpenEnv `Environment` (its class does); `action` and `observation` are its pydantic classes. As in OpenEnv
    one session lives at a time, or `max_sessions`, unless the class says `SUPPORTS_CONCURRENT_SESSIONS`."""
    if not callable(make):
        raise ConfigError("adopt takes an environment's class, or a function that makes one", hint="not an instance")
    kind = make.func if isinstance(make, partial) else make
    several = getattr(kind, "SUPPORTS_CONCURRENT_SESSIONS", False)
    if isinstance(kind, type) and not several and max_sessions is not None and max_sessions > 1:
        raise ConfigError(
            f"{kind.__name__} is for one session at a time, not {max_sessions}",
            hint="SUPPORTS_CONCURRENT_SESSIONS = True in the class, where that is true",
        )
    shapes = {"action": action} | ({} if observation is None else {"observation": observation})

    class Adopted(AdoptedEnv):
        schemas = {name: shape.model_json_schema() for name, shape in shapes.items()}

        def __init__(self) -> None:
            super().__init__(make, action)

    Adopted.max_sessions = max_sessions if max_sessions is not None or several else 1
    Adopted.__name__ = Adopted.__qualname__ = getattr(kind, "__name__", "Adopted")
    Adopted.__doc__ = inspect.getdoc(kind)
    return Adopted


class AdoptedEnv(Env):
    """It is made in the thread that its methods run in: what it opens there may belong to that thread."""

    counts_itself = True

    def __init__(self, make: Callable[[], Any], action: type[Any]) -> None:
        self._make, self._action = make, action
        self._env: Any = None
        self._tools: Sequence[Tool] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openenv")
        self._call_action = _openenv("mcp_types").CallToolAction

    async def prepare(self) -> None:
        await self._in_thread(self._begin)

    def _begin(self) -> None:
        self._env = self._make()
        if isinstance(self._env, _openenv("mcp_environment").MCPEnvironment):
            listed = self._env.step(_openenv("mcp_types").ListToolsAction())
            self._tools = [bridge(_spec(tool), self._call, timeout_s=TOOL_S, as_value=True) for tool in listed.tools]

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        given = {**(options or {})} | ({} if seed is None else {"seed": seed})
        return _result(await self._run("reset", **_choose_arguments(self._env.reset, given)))

    async def step(self, action: Any) -> StepResult:
        from pydantic import ValidationError

        try:
            typed = _openenv("serialization").deserialize_action(action, self._action)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise EnvRefused("VALIDATION_ERROR", f"action: {said}") from error
        return _result(await self._run("step", typed))

    @property
    def state(self) -> Mapping[str, Any]:
        own: dict[str, Any] = self._thread.submit(lambda: self._env.state.model_dump(mode="json")).result()
        return {name: value for name, value in own.items() if name != "episode_id" or value is not None}

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        seen = await self._run("step", self._call_action(tool_name=name, arguments=dict(arguments)))
        if seen.error is not None:
            return ToolAnswer(value={"error": seen.error.message}, text=seen.error.message, is_error=True)
        result = seen.result
        if not hasattr(result, "content"):
            return ToolAnswer(value=result, text=str(result))
        answer = read(
            [part.model_dump() for part in result.content], result.structured_content, is_error=result.is_error
        )
        return answer if answer.is_error or result.data is None else replace(answer, value=result.data)

    async def close(self) -> None:
        try:
            # After what makes it, also when cut short
            await self._in_thread(lambda: self._env is None or self._env.close())
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, method: str, *args: Any, **given: Any) -> Any:
        """The async form where its author wrote one."""
        own = getattr(type(self._env), f"{method}_async", None)
        base = _openenv("interfaces").Environment
        if own is not None and own is not getattr(base, f"{method}_async", None):
            return await own(self._env, *args, **given)
        return await self._in_thread(lambda: getattr(self._env, method)(*args, **given))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _openenv(module: str) -> Any:
    try:
        return import_module(f"openenv.core.env_server.{module}")
    except ImportError as error:
        raise ConfigError("environments of OpenEnv need its package", hint="pip install openenv==0.10.0") from error


def _choose_arguments(reset: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What it does not take is refused by name: OpenEnv's own server drops it in silence."""
    parameters = inspect.signature(reset).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    known = {one.name for one in parameters}
    if unknown := sorted(set(given) - known - {"episode_id"}):  # that one the session keeps in any case
        raise EnvRefused("VALIDATION_ERROR", f"reset of this environment takes no {', '.join(unknown)}")
    return {name: value for name, value in given.items() if name in known}


def _result(seen: Any) -> StepResult:
    observation = seen.model_dump(mode="json", exclude={"reward", "done"})
    reward = None if seen.reward is None else float(seen.reward)
    return StepResult(observation=observation, reward=reward, terminated=bool(seen.done))


def _spec(tool: Any) -> ToolSpec:
    return ToolSpec(tool.name, tool.description or "", msgspec.json.encode(tool.input_schema).decode())
