"""`FleetTaskEnv`: the hand-driven environment under the names and shapes of Fleet's own client and of SkyRL's integration.

    env = make_task_env(task_config, api_key=...)
    observation = env.reset()                                # or: await env.reset_async()
    observation, reward, done, info = env.step({"tool": ..., "params": {...}, "done": False})
    env.close()
    env.final_reward, env.verifier_stdout, env.verifier_error, env.tool_errors

Blocking and async methods are on one object: all of it runs on the one background loop of `rollyard.sync`, for every caller, so
they can be mixed. `TaskEnv` is what does the work. The shapes are those of `fleet_env` in fleet-ai's fork of OpenEnv, which
SkyRL's `integrations/fleet/env.py` calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from rollyard import sync
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.env import StepResult
from rollyard.envs.fleet.task_env import TaskLimits
from rollyard.envs.fleet.verifier_code import DetailedCheck
from rollyard.runs.envs import TaskEnv

T = TypeVar("T")
FleetStep = tuple[dict[str, Any], float | None, bool, dict[str, Any]]


class FleetTaskEnv:
    """`options` are those of `TaskEnv`. `tools` is the second handle: what an agent may be given, and nothing else."""

    def __init__(
        self,
        task_config: TaskConfig | Mapping[str, Any],
        api_key: str | None = None,
        *,
        ttl_seconds: float | None = None,
        max_steps: int = 50,
        request_timeout_s: float = 60.0,
        reset_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        config = task_config if isinstance(task_config, TaskConfig) else TaskConfig.read(task_config)
        if ttl_seconds is not None:
            config = msgspec.structs.replace(config, ttl_s=ttl_seconds)
        limits = TaskLimits(max_steps=max_steps, request_s=request_timeout_s, reset_s=reset_timeout_s)
        self.env = TaskEnv(config, api_key=api_key, limits=limits, **options)
        self.tools = AgentTools(self.env)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        return _show(sync.wait(self.env.reset(seed=seed)))

    async def reset_async(self, seed: int | None = None) -> dict[str, Any]:
        return _show(await _on_background_loop(self.env.reset(seed=seed)))

    def step(self, action: Mapping[str, Any]) -> FleetStep:
        return _step(sync.wait(self.env.step(action)))

    async def step_async(self, action: Mapping[str, Any]) -> FleetStep:
        return _step(await _on_background_loop(self.env.step(action)))

    def verify_detailed(self, final_answer: str | None = None) -> DetailedCheck:
        return sync.wait(self.env.verify_detailed(final_answer))

    async def verify_detailed_async(self, final_answer: str | None = None) -> DetailedCheck:
        return await _on_background_loop(self.env.verify_detailed(final_answer))

    def close(self) -> None:
        sync.wait(self.env.close())

    async def close_async(self) -> None:
        await _on_background_loop(self.env.close())

    @property
    def final_reward(self) -> float | None:
        return self.env.final_reward

    @property
    def verifier_stdout(self) -> str:
        return self.env.verifier_stdout

    @property
    def verifier_error(self) -> str | None:
        return self.env.verifier_error

    @property
    def tool_errors(self) -> tuple[str, ...]:
        return self.env.tool_errors


def make_task_env(
    task_config: TaskConfig | Mapping[str, Any], api_key: str | None = None, **options: Any
) -> FleetTaskEnv:
    return FleetTaskEnv(task_config, api_key, **options)


class AgentTools:
    """The agent's half: the tools of the episode. It cannot reset, end or judge the episode."""

    def __init__(self, env: TaskEnv) -> None:
        self._env = env

    def list_tools(self) -> list[dict[str, Any]]:
        """In OpenAI's format."""
        return self._env.offered

    def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """What the tool meant: parsed JSON, text, content parts where there are images, `{"error": text}` where it failed."""
        return sync.wait(self._env.use(name, arguments or {})).value

    async def call_tool_async(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        return (await _on_background_loop(self._env.use(name, arguments or {}))).value


async def _on_background_loop(work: Awaitable[T]) -> T:
    """On the background loop, awaited on this one; a caller who is cancelled cancels it."""
    return await asyncio.wrap_future(sync.submit(work))


def _show(result: StepResult) -> dict[str, Any]:
    return cast("dict[str, Any]", result.observation)


def _step(result: StepResult) -> FleetStep:
    return _show(result), result.reward, result.done, dict(result.info)
