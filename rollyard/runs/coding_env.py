"""`CodingEnv`: `run_rollout` as an environment and as a tool. One step is one rollout of an agent on a task.

Reset chooses the task: `options={"task": ID}`, `{"split": NAME, "index": N}`, `{"instruction": TEXT, ...}` with the arguments of
`run_rollout`, or the seed's place in the taskset. A rollout that broke at infrastructure is an error of the step, never a
reward of 0. `CallEnv`, where one step is one model call, is beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.events import Event
from rollyard.core.progress import Progress
from rollyard.core.protocols import EventSink
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.envs.env import Env, StepResult
from rollyard.runs.coding_request import (
    CodingArguments,
    CodingOptions,
    RolloutRequest,
    TaskRequest,
    request_of,
    summary,
)
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.taskset import Taskset
from rollyard.tools import Tool, ToolContext, ToolError
from rollyard.tools.tool import struct_tool

_TOOL_S = 7200.0
SPLIT = "tasks"


class CodingAction(msgspec.Struct, forbid_unknown_fields=True):
    """The action: which agent, where it is not the server's own."""

    agent: str | None = None


class CodingEpisode(NamedTuple):
    """What an episode is about: the task, and the other arguments of `run_rollout`."""

    task: str | Task
    arguments: CodingArguments

    @property
    def instruction(self) -> str:
        return self.task.instruction if isinstance(self.task, Task) else self.task


class TaskedEnv(Env):
    """The half that all coding environments share: tasks, and which of them an episode is about."""

    def __init__(self, options: CodingOptions, tasks: Sequence[Task] = ()) -> None:
        self._options = options
        self._tasks = tasks
        self._asked: dict[str, Any] = {}
        self._seed: int | None = None
        self._task_id: str | None = None
        self._episode: CodingEpisode | None = None

    @property
    def state(self) -> Mapping[str, Any]:
        return {"task_id": self._task_id, "tasks": len(self._tasks)}

    def _choose(self, seed: int | None, wanted: Mapping[str, Any]) -> None:
        """What `run_rollout` gets, checked before anything opens."""
        if "instruction" in wanted:
            request = request_of(wanted)
            instruction, arguments = request.instruction, request.arguments(self._options)
            self._task_id = request.task_id
        else:
            instruction, arguments = self._find_task(seed, wanted), self._options.settings
            self._task_id = instruction.id
        options = arguments.get("options")
        if seed is not None and (options is None or options.mode != "black_box"):  # there it chooses the task alone
            arguments["seed"] = seed
        self._asked, self._seed, self._episode = dict(wanted), seed, CodingEpisode(instruction, arguments)

    def _find_task(self, seed: int | None, wanted: Mapping[str, Any]) -> Task:
        if unknown := sorted(set(wanted) - {"task", "split", "index"}):
            raise EnvError(f"options: there is no {', '.join(unknown)}", hint="task, split and index, or instruction")
        if not self._tasks:
            raise EnvError("this server has no tasks", hint="reset with options={'instruction': ...}")
        if wanted.get("split", SPLIT) != SPLIT:
            raise EnvError(f"there is no split {wanted['split']!r}", hint=SPLIT)
        if "task" in wanted:
            for task in self._tasks:
                if task.id == wanted["task"]:
                    return task
            raise EnvError(f"there is no task {wanted['task']!r}")
        index = wanted.get("index")
        if index is None:
            return self._tasks[(seed or 0) % len(self._tasks)]
        if type(index) is not int or not 0 <= index < len(self._tasks):
            raise EnvError(f"index must be an integer from 0 to {len(self._tasks) - 1}")
        return self._tasks[index]

    def _current(self) -> CodingEpisode:
        if self._episode is None:
            raise EnvError("there is no task yet: reset")
        return self._episode


class CodingEnv(TaskedEnv):
    """Runs a coding agent on a task in a sandbox and gives its reward."""

    action = CodingAction

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        self._choose(seed, options or {})
        return StepResult(observation={"task_id": self._task_id, "instruction": self._current().instruction})

    async def step(self, action: CodingAction) -> StepResult:
        task, arguments = self._current()
        arguments = arguments.copy()
        if action.agent is not None:
            arguments["agent"] = action.agent
        arguments["sink"] = progress_sink(self.report_progress)
        return step_result(await run_rollout(task, **arguments))

    def tools(self) -> Sequence[Tool]:
        async def one(request: TaskRequest, context: ToolContext) -> dict[str, Any]:
            try:
                arguments = request.arguments(self._options)
                arguments["sink"] = progress_sink(context.progress)
                return summary(await run_rollout(request.instruction, **arguments))
            except ConfigError as error:
                raise ToolError(str(error)) from error

        words = "Run a coding agent on an instruction in a fresh sandbox; the reward is the share of `verify` that succeeds."
        return [struct_tool(RolloutRequest, one, name="run_rollout", description=words, timeout_s=_TOOL_S)]

    def save(self) -> Any:
        """A rollout that a kill cut off is run again from its task: it was never answered."""
        return {"seed": self._seed, "asked": self._asked, "chosen": self._episode is not None}

    async def restore(self, saved: Any) -> None:
        if saved["chosen"]:
            self._choose(saved["seed"], saved["asked"])


def step_result(done: Rollout) -> StepResult:
    """The end of an episode. What broke at infrastructure is an error."""
    if done.failure is not None and not done.failure.grade:
        raise EnvError(f"{done.failure.boundary}: {done.failure.message}")
    cut = done.status in ("timeout", "budget")
    return StepResult(observation=summary(done), reward=done.reward, terminated=not cut, truncated=cut)


def progress_sink(progress: Progress) -> EventSink:
    """A rollout's events as progress: how many there were, and what the last one is."""
    count = itertools.count(1)

    async def sink(event: Event) -> None:
        about = event.fields.get("stage") or event.fields.get("tool") or event.fields.get("status")
        await progress(next(count), None, event.name if about is None else f"{event.name} {about}")

    return sink


def tasks_of(source: str | None) -> Sequence[Task]:
    return Taskset.load(source) if source is not None else ()


def splits_of(tasks: Sequence[Task]) -> dict[str, list[dict[str, Any]]]:
    """The taskset as the Task API shows it."""
    rows = [{"index": n, "task_id": t.id, "task_name": t.id, "instruction": t.instruction} for n, t in enumerate(tasks)]
    return {SPLIT: rows} if rows else {}


def coding_env(options: CodingOptions, tasks: Sequence[Task] = (), *, step: str = "rollout") -> Callable[[], Env]:
    """What makes the environment of each session; a step is a whole `rollout`, or one model `call`."""
    from rollyard.runs.call_env import CallEnv

    kinds: dict[str, type[TaskedEnv]] = {"rollout": CodingEnv, "call": CallEnv}
    if step not in kinds:
        raise ConfigError(f"a step is a rollout or a call, not {step!r}")

    def make() -> Env:
        return kinds[step](options, tasks)

    make.__doc__ = kinds[step].__doc__
    for name in ("action", "observation"):
        setattr(make, name, getattr(kinds[step], name))
    return make
