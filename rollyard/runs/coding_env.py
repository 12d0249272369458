"""`CodingEnv`: `run_rollout` as an environment and as a tool. One step is one rollout of an agent on a task.

Reset chooses the task: `options={"task": ID}`, or `{"instruction": TEXT, ...}` with a task's own fields, or the seed's place
in the taskset. A rollout that broke at infrastructure is an error of the step, never a reward of 0. Who answers the agent's
model calls is decided by whoever serves this, not by its clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.envs.env import Env, StepResult
from rollyard.runs.once import run_rollout
from rollyard.tasks.rows import as_task
from rollyard.tasks.taskset import Taskset
from rollyard.tools import Tool, ToolError, tool

_TOOL_S = 7200.0


class CodingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a server fixes for every rollout. `policy` is a name such as `upstream:URL`, or the policy itself."""

    agent: str = "opencode"
    policy: Any = None
    base_url: str | None = None
    model: str | None = None
    key: str | None = None
    mode: str | None = None
    sandbox: Any = "local"
    max_calls: int | None = None

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Attempt(msgspec.Struct, forbid_unknown_fields=True):
    """The action: which agent, where it is not the server's own."""

    agent: str | None = None


class CodingEnv(Env):
    """Runs a coding agent on a task in a sandbox and gives its reward."""

    action = Attempt

    def __init__(self, options: CodingOptions, tasks: Sequence[Task] = ()) -> None:
        self._options = options
        self._tasks = tasks
        self._task: Task | None = None
        self._seed: int | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        self._task, self._seed = self._chosen(seed, dict(options or {})), seed
        return StepResult(observation={"task_id": self._task.id, "instruction": self._task.instruction})

    async def step(self, action: Attempt) -> StepResult:
        if self._task is None:
            raise EnvError("there is no task yet: reset")
        done = await self._run(self._task, action.agent)
        if done.failure is not None and not done.failure.grade:
            raise EnvError(f"{done.failure.boundary}: {done.failure.message}")
        cut = done.status in ("timeout", "budget")
        told = summary(done)
        return StepResult(observation=told, reward=done.reward, terminated=not cut, truncated=cut)

    @property
    def state(self) -> Mapping[str, Any]:
        return {"task_id": self._task.id if self._task is not None else None, "tasks": len(self._tasks)}

    def tools(self) -> Sequence[Tool]:
        async def one(
            instruction: str,
            agent: str | None = None,
            files: dict[str, str] | None = None,
            setup: list[str] | None = None,
            verify: list[str] | None = None,
        ) -> dict[str, Any]:
            """Run a coding agent on an instruction in a fresh sandbox; the reward is the share of `verify` that succeeds."""
            try:
                done = await self._run(
                    instruction, agent, files=files, setup=tuple(setup or ()), verify=tuple(verify or ())
                )
            except ConfigError as error:
                raise ToolError(str(error)) from error
            return summary(done)

        return [tool(name="run_rollout", timeout_s=_TOOL_S)(one)]

    async def _run(self, task: str | Task, agent: str | None, **more: Any) -> Rollout:
        settings = self._options.settings()
        if agent is not None:
            settings["agent"] = agent
        return await run_rollout(task, seed=self._seed, **settings, **more)

    def _chosen(self, seed: int | None, asked: dict[str, Any]) -> Task:
        if "instruction" in asked:
            return as_task(asked)
        if not self._tasks:
            raise EnvError("this server has no tasks", hint="reset with options={'instruction': ...}")
        if "task" in asked:
            for task in self._tasks:
                if task.id == asked["task"]:
                    return task
            raise EnvError(f"there is no task {asked['task']!r}")
        return self._tasks[(seed or 0) % len(self._tasks)]


def coding_env(options: CodingOptions, taskset: str | None = None) -> Callable[[], CodingEnv]:
    """What makes the environment of each session; the tasks are loaded once, now."""
    tasks: Sequence[Task] = Taskset.load(taskset) if taskset is not None else ()
    return lambda: CodingEnv(options, tasks)


def summary(done: Rollout) -> dict[str, Any]:
    """A rollout as plain values: everything but the bytes of its files, which are named with their sizes."""
    return {
        "rollout_id": done.id,
        "task_id": done.task_id,
        "sandbox_id": done.sandbox_id,
        "agent": done.agent,
        "mode": done.mode,
        "status": done.status,
        "reward": done.reward,
        "setup": msgspec.to_builtins(done.setup),
        "verify": msgspec.to_builtins(done.verdict.commands) if done.verdict is not None else [],
        "exit_code": done.exit_code,
        "log_tail": done.log_tail,
        "gate_log_tail": done.gate_log_tail,
        "turns": msgspec.to_builtins(done.turns),
        "files": {path: len(content) for path, content in done.files.items()},
        "wall_s": done.wall_s,
        "error": done.error,
    }
