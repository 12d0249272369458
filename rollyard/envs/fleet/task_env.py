"""`RemoteTaskEnv`: a task in an environment that runs somewhere else, as an `Env`. The agent's moves are tool calls.

Making one does no I/O. The first reset provisions an instance, and later ones use it again. The reward comes from the task's
verifier code at the end of an episode, wherever that is: a step, the last step allowed, or `close` for an episode that was left.
It is None unless the verifier gave a score. This is the one implementation; `rollyard.sync` blocks on it for those who need that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

import msgspec

from rollyard.core.errors import ConfigError, EnvError, EpisodeLost, Error
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.env import Env, StepResult
from rollyard.envs.fleet.databases import MAX_ROWS, Databases, QueryRows, Table
from rollyard.envs.fleet.provider import EnvProvider
from rollyard.envs.fleet.remote_episode import Judge, RemoteEpisode
from rollyard.envs.fleet.task_instance import Leases, TaskInstance, open_instance
from rollyard.envs.fleet.verifier_code import DetailedCheck
from rollyard.envs.telemetry import Telemetry
from rollyard.tools.answers import ToolAnswer
from rollyard.tools.remote import openai_tool


class ToolAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One move: a tool with its parameters, the end of the episode, or both in this order."""

    tool: str | None = None
    params: dict[str, Any] = {}
    done: bool = False


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reset_s` is the manager's share of a reset and has nothing to do with `request_s`, which every tool call gets."""

    max_steps: int = 50
    request_s: float = 60.0
    reset_s: float = 30.0


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """What a hint for another attempt can be made of."""

    tool_errors: tuple[str, ...] = ()
    verifier_stdout: str = ""
    verifier_error: str | None = None


class RemoteTaskEnv(Env):
    """`judge` runs verifier code; `leases` lend browsers and are needed for `browser_use` alone. Set `conversation` where a
    verifier wants to read it."""

    action = ToolAction

    def __init__(
        self,
        config: TaskConfig,
        provider: EnvProvider,
        judge: Judge,
        *,
        leases: Leases | None = None,
        limits: TaskLimits | None = None,
        partial_reward: bool = False,
    ) -> None:
        if config.task_modality == "browser_use" and leases is None:
            raise ConfigError(
                "a browser_use task needs a browser",
                hint="set ROLLYARD_BROWSER_URL and ROLLYARD_BROWSER_KEY, or pass leases=",
            )
        self.config, self.limits = config, limits or TaskLimits()
        self.partial_reward = partial_reward or config.partial_reward
        self.conversation: list[Any] | None = None
        self._provider, self._judge, self._leases = provider, judge, leases
        self._telemetry = Telemetry(env_key=config.env_key, task_key=config.task_key or None)
        self._task_instance: TaskInstance | None = None
        self._episode: RemoteEpisode | None = None
        self._steps = 0
        self._over = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # what an episode left

    @property
    def final_reward(self) -> float | None:
        return self._episode.reward if self._episode is not None else None

    @property
    def feedback(self) -> Feedback:
        """Of this episode: a reset clears it."""
        episode = self._episode
        if episode is None:
            return Feedback()
        return Feedback(
            tool_errors=tuple(episode.tool_errors),
            verifier_stdout=episode.verifier_stdout,
            verifier_error=episode.verifier_error,
        )

    @property
    def tool_errors(self) -> tuple[str, ...]:
        return self.feedback.tool_errors

    @property
    def verifier_stdout(self) -> str:
        return self.feedback.verifier_stdout

    @property
    def verifier_error(self) -> str | None:
        return self.feedback.verifier_error

    @property
    def state(self) -> Mapping[str, Any]:
        return {
            "task_key": self.config.task_key,
            "instance_id": self._task_instance.instance.id if self._task_instance is not None else None,
            "step": self._steps,
        }

    # the moves

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        if self._closed:
            raise EnvError("this environment is closed")
        self._episode, self.conversation, self._steps, self._over = None, None, 0, False
        try:
            observation = await self._begin(seed)
        except BaseException:  # cancelled too: half an episode holds an instance
            self._episode = None
            await self._release()
            raise
        return StepResult(observation=observation)

    async def step(self, action: ToolAction | Mapping[str, Any]) -> StepResult:
        move = action if isinstance(action, ToolAction) else msgspec.convert(dict(action), ToolAction)
        episode = self._current()
        self._steps += 1
        shown, info = await _use_tool(episode, move)
        if episode.answer is not None:
            reason = "submitted"
        elif move.done:
            reason = "done"
        else:
            reason = "max_steps" if self._steps >= self.limits.max_steps else None
        if reason is not None:
            self._over = True
            await self._judge_episode(episode)
        return StepResult(
            observation={"observation": shown, "step": self._steps},
            reward=episode.reward,
            terminated=reason in ("submitted", "done"),
            truncated=reason == "max_steps",
            info={
                "step": self._steps,
                "done_reason": reason,
                "reward_computed": episode.reward_computed,
                "submitted_answer": episode.answer,
                **info,
            },
        )

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The episode's tools in OpenAI's format, as the first observation has them."""
        return [openai_tool(spec) for spec in self._current().specs]

    async def use(self, tool: str, params: Mapping[str, Any]) -> ToolAnswer:
        """A tool call that is no step, for callers that hold the tools alone."""
        return await self._current().use(tool, params)

    def _current(self) -> RemoteEpisode:
        if self._episode is None or self._over:
            raise EnvError("there is no episode: reset")
        return self._episode

    async def close(self) -> None:
        """Judges an episode that was left before its end, then lets go of everything. Once."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._episode is not None and not self._episode.reward_computed:
                await self._judge_episode(self._episode)
        finally:
            await self._release()
            self._telemetry.say("env.closed", reward=self.final_reward)

    async def verify_detailed(self, final_answer: str | None = None) -> DetailedCheck:
        """The verifier as the instance stands now, told as `verify_detailed` of Fleet's SDK tells it. It ends nothing and sets no
        reward; without an answer it is the one that was handed in."""
        episode, code = self._episode, self.config.verifier_code
        if episode is None or not code:
            raise EnvError("there is no episode: reset" if code else f"task {self.config.task_key!r} has no verifier")
        check = episode.check(code, self.conversation)
        if final_answer is not None:
            check = msgspec.structs.replace(check, final_answer=final_answer)
        return (await self._judge(check, episode.task_instance.instance.databases)).detailed

    # the databases

    async def list_dbs(self) -> tuple[str, ...]:
        return tuple(await self._databases().names())

    async def describe_db(self, name: str = "current") -> list[Table]:
        return await self._databases().describe(name)

    async def query_db(
        self,
        sql: str,
        args: tuple[Any, ...] | list[Any] = (),
        name: str = "current",
        *,
        read_only: bool = True,
        max_rows: int = MAX_ROWS,
    ) -> QueryRows:
        return await self._databases().query(name, sql, args, read_only=read_only, max_rows=max_rows)

    def _databases(self) -> Databases:
        if self._task_instance is None:
            raise EnvError("there is no instance yet: reset")
        return self._task_instance.instance.databases

    # how it is done

    async def _begin(self, seed: int | None) -> dict[str, Any]:
        with self._telemetry.span("env.reset"):
            task_instance = await self._prepare_instance(seed)
            await task_instance.show_page()
            episode = RemoteEpisode(self.config, task_instance, self._telemetry, partial_reward=self.partial_reward)
            observation: dict[str, Any] = {
                "prompt": self.config.prompt,
                "task_key": self.config.task_key,
                "modality": self.config.task_modality,
                "tools": [openai_tool(spec) for spec in episode.specs],
                "step": 0,
            }
            if self.config.task_modality != "tool_use":
                observation["initial_screenshot"] = await task_instance.screenshot()
            self._episode = episode
            return observation

    async def _prepare_instance(self, seed: int | None) -> TaskInstance:
        """The instance, put back to its beginning. A manager that fails at that costs a warning; an instance that is gone is
        replaced, once."""
        for fresh in (self._task_instance is None, True):
            task_instance = self._task_instance = self._task_instance or await self._open_instance()
            try:
                await task_instance.begin(self._telemetry, seed=seed, timeout_s=self.limits.reset_s, fresh=fresh)
            except EpisodeLost:
                await self._release()
                continue
            return task_instance
        raise AssertionError("the second instance is fresh")

    async def _open_instance(self) -> TaskInstance:
        return await open_instance(
            self.config, self._provider, self._telemetry, request_s=self.limits.request_s, leases=self._leases
        )

    async def _judge_episode(self, episode: RemoteEpisode) -> None:
        """Whatever the verifier does, the episode ends."""
        if self._task_instance is None:
            episode.unjudged = f"task {self.config.task_key or '(unnamed)'} has no instance to verify"
            return
        with suppress(Error, OSError, TimeoutError):  # then `verifier_error` says why there is no reward
            await episode.verify(self._judge, self.conversation)

    async def _release(self) -> None:
        task_instance, self._task_instance = self._task_instance, None
        if task_instance is not None:
            await asyncio.shield(asyncio.ensure_future(task_instance.release()))


async def _use_tool(episode: RemoteEpisode, move: ToolAction) -> tuple[Any, dict[str, Any]]:
    """What the agent sees, and what `info` says of it."""
    if move.tool is None:
        return "", {"tool_result": None, "tool_error": None}
    answer = await episode.use(move.tool, move.params)
    if answer.is_error:
        return f"error: {answer.text}", {"tool_result": None, "tool_error": answer.text}
    return answer.content, {"tool_result": answer.value, "tool_error": None}
