"""An environment written for OpenEnv behind our server: `adopt(EchoEnvironment, CallToolAction)` is a class to serve.

    # my_env.py
    from envs.echo_env.server.echo_environment import EchoEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction
    from rollyard.envs.openenv_env import adopt

    Echo = adopt(EchoEnvironment, CallToolAction)    # rollyard serve env my_env.py:Echo

Its blocking methods run in one thread of the session's own, as OpenEnv's server runs them; what it writes as async is awaited.
Tools of an `MCPEnvironment` are its tools here, over real MCP too. The package is imported when an environment is made.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def adopt(make: Callable[[], Any], action: type[Any]) -> type[Env]:
    """`make` gives an OpenEnv `Environment` (its class does); `action` is its action's pydantic class."""
    if not callable(make):
        raise ConfigError("adopt takes an environment's class, or a function that makes one", hint="not an instance")

    class Adopted(AdoptedEnv):
        def __init__(self) -> None:
            super().__init__(make(), action)

    Adopted.__name__ = Adopted.__qualname__ = getattr(make, "__name__", "Adopted")
    Adopted.__doc__ = inspect.getdoc(make)
    return Adopted


class AdoptedEnv(Env):
    def __init__(self, env: Any, action: type[Any]) -> None:
        self._env, self._action = env, action
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openenv")
        types = _openenv("mcp_types")
        self._list_action, self._call_action = types.ListToolsAction, types.CallToolAction
        self._has_tools = isinstance(env, _openenv("mcp_environment").MCPEnvironment)

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        given = {**(options or {})} | ({} if seed is None else {"seed": seed})
        accepted = _accepted(self._env.reset, given)
        return _result(await self._run("reset", **accepted))

    async def step(self, action: Any) -> StepResult:
        from pydantic import ValidationError

        try:
            typed = self._action(**action)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise EnvRefused("VALIDATION_ERROR", f"action: {said}") from error
        return _result(await self._run("step", typed))

    @property
    def state(self) -> Mapping[str, Any]:
        return self._thread.submit(lambda: self._env.state.model_dump(mode="json")).result()

    def tools(self) -> Sequence[Tool]:
        if not self._has_tools:
            return ()
        listed = self._thread.submit(lambda: self._env.step(self._list_action())).result()
        return [bridge(_spec(tool), self._call, timeout_s=TOOL_S, as_value=True) for tool in listed.tools]

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
            await self._in_thread(self._env.close)
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


def _accepted(reset: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What it does not take is refused by name: OpenEnv's own server drops it in silence."""
    parameters = inspect.signature(reset).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    known = {one.name for one in parameters}
    if unknown := sorted(set(given) - known):
        raise EnvRefused("VALIDATION_ERROR", f"reset of this environment takes no {', '.join(unknown)}")
    return dict(given)


def _result(seen: Any) -> StepResult:
    observation = seen.model_dump(mode="json", exclude={"reward", "done"})
    reward = None if seen.reward is None else float(seen.reward)
    return StepResult(observation=observation, reward=reward, terminated=bool(seen.done))


def _spec(tool: Any) -> ToolSpec:
    return ToolSpec(tool.name, tool.description or "", msgspec.json.encode(tool.input_schema).decode())
