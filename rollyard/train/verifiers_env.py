"""A verifiers 0.4 environment around any agent, taskset, sandbox and verifier: verifiers' own clients, budgets, traces and
servers, so that prime-rl trains on it as on any other.

    env = load_environment("tasks/", agent="opencode", sandbox="local", rewards={"short": (short, 0.2)})
    episodes = await env.evaluate(AsyncOpenAI(...), "qwen", rollouts_per_example=4)

The rollout is ours: the agent's sandbox, its setup, its verifier. The model's side is theirs: the agent's calls pass through the
gate unread to verifiers' interception server, whose `Trace` gets every message, id and logprob. `rollyard_verifiers` is this
module under a name that verifiers' command line finds: `vf-eval rollyard-verifiers --env.taskset.source tasks/` runs opencode
on a folder of Harbor tasks. This module imports verifiers; nothing else here does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from msgspec.structs import replace

from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.taskset import Taskset
from rollyard.train.verifiers import Reward

PACKAGE = "verifiers"
PLUGIN = "rollyard-verifiers"
try:
    vf: Any = import_module(f"{PACKAGE}.v1")
except ImportError as missing:
    raise ConfigError("this environment needs verifiers", hint="pip install verifiers==0.4.0") from missing

KEY_VARIABLE = "ROLLYARD_VERIFIERS_KEY"


class LiveParts(NamedTuple):
    """What no configuration file can hold: the caller's own tasks, functions and objects."""

    tasks: Mapping[str, Task]
    rewards: tuple[Reward, ...] = ()
    options: Mapping[str, Any] = {}


_live: dict[str, LiveParts] = {}


def make_environment(
    taskset: Any,
    *,
    agent: str,
    rewards: Mapping[str, Reward | tuple[Reward, float]],
    judged: float,
    options: Mapping[str, Any],
) -> VerifiersEnv:
    found = {task.id: task for task in Taskset.load(taskset)}
    if not found:
        raise ConfigError("the taskset has no tasks", hint="name a folder of tasks, a JSON Lines file or a dataset")
    key = new_id("vf")
    _live[key] = LiveParts(found, tuple(_weigh(name, one) for name, one in rewards.items()), options)
    config = EnvironmentConfig(
        taskset=VerifiersTasksetConfig(id=PLUGIN, source=f"live:{key}", judged=judged),
        agent=vf.AgentConfig(
            runtime=vf.SubprocessConfig(), harness=VerifiersHarnessConfig(id=PLUGIN, agent=agent).model_dump()
        ),
    )
    return VerifiersEnv(config)


def _weigh(name: str, given: Reward | tuple[Reward, float]) -> Reward:
    function, weight = given if isinstance(given, tuple) else (given, 1.0)

    async def score(task: Any, trace: Any) -> Any:
        wanted = {"task": task, "trace": trace}
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if unknown := [one for one in names if one not in wanted]:
            raise ConfigError(f"reward {name!r} asks for {', '.join(unknown)}", hint="it may ask for task and trace")
        said = function(**{one: wanted[one] for one in names})
        return await said if asyncio.iscoroutine(said) else said

    score.__name__ = name
    return vf.reward(score, weight=weight)


@cache
def _load(source: str) -> LiveParts:
    return LiveParts({task.id: task for task in Taskset.load(source)})


def _parts(source: str) -> LiveParts:
    if not source.startswith("live:"):
        return _load(source)
    if (kept := _live.get(source.removeprefix("live:"))) is None:
        raise ConfigError(
            "this environment was made in another process, with objects that cannot be sent",
            hint="name the tasks with --env.taskset.source, or run with --no-serve",
        )
    return kept


class VerifiersData(vf.TaskData):
    source: str = ""
    task_id: str = ""
    judged: float = 1.0


class VerifiersState(vf.State):
    rollout: Any = None


class VerifiersTask(vf.Task[VerifiersData, VerifiersState, vf.TaskConfig]):
    @property
    def key(self) -> str:
        return self.data.task_id

    def hooks(self, attr: str) -> list[Callable[..., Any]]:
        found: list[Callable[..., Any]] = super().hooks(attr)
        if attr != "reward":
            return found
        return [*found, vf.reward(self._verdict, weight=self.data.judged), *_parts(self.data.source).rewards]

    @property
    def _verdict(self) -> Reward:
        async def verdict(trace: Any) -> float:
            """The task's verifier. Where it gave no reward the episode has an error, never a zero."""
            rollout: Rollout | None = trace.state.rollout
            if rollout is None or rollout.reward is None:
                why = "it did not run" if rollout is None else rollout.error or "the task has no verifier"
                raise ValueError(f"there is no verdict: {why}")
            return rollout.reward

        return verdict


class VerifiersTasksetConfig(vf.TasksetConfig):
    source: str = ""
    """What `Taskset.load` takes: a folder of Harbor tasks, a JSON Lines file, a dataset's name."""
    judged: float = 1.0
    """The weight of the tasks' own verifiers."""


class VerifiersTaskset(vf.Taskset[VerifiersTask, VerifiersTasksetConfig]):
    def load(self) -> Any:
        source, judged = self.config.source, self.config.judged
        if not source:
            raise ConfigError("which tasks?", hint="--env.taskset.source PATH")
        for index, task in enumerate(_parts(source).tasks.values()):
            data = VerifiersData(
                idx=index,
                name=task.id,
                prompt=task.instruction,
                source=source,
                task_id=task.id,
                judged=judged,
            )
            yield VerifiersTask(data, self.config.task)


class VerifiersHarnessConfig(vf.HarnessConfig):
    agent: str = "opencode"
    sandbox: str = "local"
    options: dict[str, Any] = {}
    """More options of `run_rollout`, by name."""


class VerifiersHarness(vf.Harness[VerifiersHarnessConfig]):
    """Any agent of ours in any sandbox of ours; nothing runs in the seat's own runtime."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        config = self.config
        system, instruction = self.resolve_text_prompt(data)
        parts = _parts(data.source)
        options: dict[str, Any] = {"sandbox": config.sandbox, **config.options, **parts.options}
        if system is not None:
            options["system_prompt"] = system
        if config.disabled_tools:
            options["disabled_tools"] = tuple(config.disabled_tools)
        task = replace(parts.tasks[data.task_id], instruction=instruction or "")
        if config.resolved_env:
            task = replace(task, env={**task.env, **config.resolved_env})
        rollout = await run_rollout(
            task, agent=config.agent, mode="black_box", base_url=endpoint, key=secret, model=ctx.model, **options
        )
        trace.state.rollout = rollout
        trace.info["rollyard"] = describe(rollout)
        failure = rollout.failure
        if failure is not None and not failure.grade:
            kind = vf.SandboxError if failure.boundary == "sandbox" else vf.HarnessError
            raise kind(f"{failure.stage}: {failure.message}")
        return vf.ProgramResult(exit_code=0, stdout=rollout.log_tail, stderr="")


def describe(rollout: Rollout) -> dict[str, Any]:
    """What of a rollout goes with a trace."""
    verdict = rollout.verdict
    return {
        "rollout_id": rollout.id,
        "task_id": rollout.task.id,
        "agent": rollout.agent,
        "status": rollout.status,
        "exit_code": rollout.exit_code,
        "reward": rollout.reward,
        "parts": dict(verdict.parts) if verdict is not None else {},
        "calls": rollout.calls,
        "wall_s": rollout.wall_s,
        "error": rollout.error,
    }


class EnvironmentConfig(vf.SingleAgentEnvConfig):
    """The agent's place is a sandbox of ours: the seat's own runtime is this process."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())  # pyright: ignore[reportInvalidTypeForm]


class VerifiersEnv(vf.Env[EnvironmentConfig]):
    """`dataset` are its tasks; `evaluate` runs them with an OpenAI client."""

    @property
    def dataset(self) -> list[dict[str, Any]]:
        return [task.data.model_dump(mode="json") for task in self.taskset]

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)

    async def evaluate(
        self,
        client: Any,
        model: str,
        *,
        num_examples: int | None = None,
        rollouts_per_example: int = 1,
        max_concurrent: int = 8,
        sampling: Mapping[str, Any] | None = None,
    ) -> Sequence[Any]:
        """An `Episode` for each task and rollout; each trace has its tokens, rewards and `state`."""
        variable = f"{KEY_VARIABLE}_{new_id('vf')}"  # verifiers takes a key by its variable's name only
        os.environ[variable] = str(client.api_key)
        config = vf.EvalClientConfig(base_url=str(client.base_url).rstrip("/"), api_key_var=variable)
        context = vf.ModelContext(client=config, model=model, sampling=vf.SamplingConfig(**(sampling or {})))
        tasks = list(self.taskset)[:num_examples]
        gate = asyncio.Semaphore(max_concurrent)
        try:
            async with self.serving():
                slots = [slot for task in tasks for slot in self.slots(task, rollouts_per_example)]
                return await asyncio.gather(*(self.run_slot(slot, context, gate) for slot in slots))
        finally:
            del os.environ[variable]


__all__ = ["VerifiersEnv", "VerifiersHarness", "VerifiersTaskset"]
