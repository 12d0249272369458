"""`RemoteTaskEnv`: a task in an environment that runs somewhere else, as an `Env`. The agent's moves are tool calls.

Making one does no I/O. The first reset provisions an instance, and later ones use it again. The reward comes from the task's
verifier code at the end of an episode, wherever that is: a step, the last step allowed, or `close` for an episode that was left.
It is None unless the verifier gave a score. This is the one implementation; `rollyard.sync` blocks on it for those who need that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from rollyard.core.errors import ConfigError, EnvError, EpisodeLost, Error
from rollyard.envs.env import Env, StepResult
from rollyard.envs.fleet.databases import MAX_ROWS, Databases, QueryRows, Table
from rollyard.envs.fleet.partial_reward import partial
from rollyard.envs.fleet.provider import EnvProvider
from rollyard.envs.fleet.task_config import SUBMIT, TaskConfig
from rollyard.envs.fleet.task_instance import Leases, TaskInstance, open_instance
from rollyard.envs.fleet.verifier_code import Checked, VerifierCode
from rollyard.envs.telemetry import Telemetry
from rollyard.tools.remote import openai_tool

Judge = Callable[[VerifierCode, Databases | None], Awaitable[Checked]]
SUBMIT_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": SUBMIT,
        "description": "Hand in the final answer. This ends the task.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "the answer"}},
            "required": ["answer"],
        },
    },
}


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


class Episode:
    def __init__(self) -> None:
        self.step = 0
        self.over = False
        self.answer: str | None = None
        self.tool_errors: list[str] = []
        self.judged: Checked | None = None
        self.unjudged: str | None = None  # why the verifier was not even run
        self.reward: float | None = None

    @property
    def reward_computed(self) -> bool:
        return self.judged is not None or self.unjudged is not None


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
            raise ConfigError("browser_use needs somebody who lends browsers")
        self.config, self.limits, self.partial_reward = config, limits or TaskLimits(), partial_reward
        self.conversation: list[Any] | None = None
        self._provider, self._judge, self._leases = provider, judge, leases
        self._telemetry = Telemetry(env_key=config.env_key, task_key=config.task_key or None)
        self._ground: TaskInstance | None = None
        self._episode: Episode | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        judged = episode.judged
        return Feedback(
            tool_errors=tuple(episode.tool_errors),
            verifier_stdout=judged.stdout if judged is not None else "",
            verifier_error=judged.error if judged is not None else episode.unjudged,
        )

    @property
    def state(self) -> Mapping[str, Any]:
        return {
            "task_key": self.config.task_key,
            "instance_id": self._ground.instance.id if self._ground is not None else None,
            "step": self._episode.step if self._episode is not None else 0,
        }

    # the moves

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> StepResult:
        if self._closed:
            raise EnvError("this environment is closed")
        self._episode, self.conversation = None, None
        try:
            observation = await self._begin(seed)
        except BaseException:  # cancelled too: half an episode holds an instance
            await self._release()
            raise
        self._episode = Episode()
        return StepResult(observation=observation)

    async def step(self, action: ToolAction | Mapping[str, Any]) -> StepResult:
        move = action if isinstance(action, ToolAction) else msgspec.convert(dict(action), ToolAction)
        episode, ground = self._episode, self._ground
        if episode is None or ground is None or episode.over:
            raise EnvError("there is no episode: reset")
        episode.step += 1
        shown, info = await self._use_tool(move, episode, ground)
        if episode.answer is not None:
            reason = "submitted"
        elif move.done:
            reason = "done"
        else:
            reason = "max_steps" if episode.step >= self.limits.max_steps else None
        if reason is not None:
            episode.over = True
            await self._judge_episode(episode)
        return StepResult(
            observation={"observation": shown, "step": episode.step},
            reward=episode.reward,
            terminated=reason in ("submitted", "done"),
            truncated=reason == "max_steps",
            info={
                "step": episode.step,
                "done_reason": reason,
                "reward_computed": episode.reward_computed,
                "submitted_answer": episode.answer,
                **info,
            },
        )

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
        if self._ground is None:
            raise EnvError("there is no instance yet: reset")
        return self._ground.instance.databases

    # how it is done

    async def _begin(self, seed: int | None) -> dict[str, Any]:
        with self._telemetry.span("env.reset"):
            ground = await self._prepare_instance(seed)
            await ground.show_page()
            tools = [openai_tool(spec) for spec in ground.specs]
            if self.config.wants_answer:
                tools = [*(tool for tool in tools if tool["function"]["name"] != SUBMIT), dict(SUBMIT_TOOL)]
            observation: dict[str, Any] = {
                "prompt": self.config.prompt,
                "task_key": self.config.task_key,
                "modality": self.config.task_modality,
                "tools": tools,
                "step": 0,
            }
            if self.config.task_modality != "tool_use":
                observation["initial_screenshot"] = await ground.screenshot()
            return observation

    async def _prepare_instance(self, seed: int | None) -> TaskInstance:
        """The ground, put back to its beginning. A manager that fails at that costs a warning; an instance that is gone is
        replaced, once."""
        for fresh in (self._ground is None, True):
            ground = self._ground = self._ground or await self._open_instance()
            try:
                await ground.instance.reset(seed=seed, timeout_s=self.limits.reset_s)
            except EpisodeLost as error:
                if not fresh:
                    await self._release()
                    continue
                self._telemetry.warn("env.reset_failed", cause=error.message)
            except EnvError as error:
                self._telemetry.warn("env.reset_failed", cause=error.message)
            return ground
        raise AssertionError("the second ground is fresh")

    async def _open_instance(self) -> TaskInstance:
        return await open_instance(
            self.config, self._provider, self._telemetry, request_s=self.limits.request_s, leases=self._leases
        )

    async def _use_tool(self, move: ToolAction, episode: Episode, ground: TaskInstance) -> tuple[Any, dict[str, Any]]:
        """What the agent sees, and what `info` says of it."""
        if move.tool is None:
            return "", {"tool_result": None, "tool_error": None}
        if move.tool == SUBMIT and self.config.wants_answer:
            given = move.params.get("answer", "")
            episode.answer = given if isinstance(given, str) else msgspec.json.encode(given).decode()
            return "The answer was handed in.", {"tool_result": None, "tool_error": None}
        known = [spec.name for spec in ground.specs]
        if move.tool not in known:
            return self._observe_error(episode, f"there is no tool named {move.tool!r}; known: {', '.join(known)}")
        assert ground.tools is not None
        try:
            with self._telemetry.span("env.call", tool=move.tool):
                answer = await ground.tools.ask(move.tool, move.params)
        except EnvError as error:
            return self._observe_error(episode, error.message)
        if answer.is_error:
            return self._observe_error(episode, answer.text)
        return answer.content, {"tool_result": answer.value, "tool_error": None}

    def _observe_error(self, episode: Episode, words: str) -> tuple[Any, dict[str, Any]]:
        episode.tool_errors.append(words)
        return f"error: {words}", {"tool_result": None, "tool_error": words}

    async def _judge_episode(self, episode: Episode) -> None:
        """Sets the reward, or why there is none. Whatever the verifier does, the episode ends."""
        code, ground = self.config.verifier_code, self._ground
        if not code:
            episode.unjudged = f"task {self.config.task_key or '(unnamed)'} has no verifier"
            return
        if ground is None:
            episode.unjudged = f"task {self.config.task_key or '(unnamed)'} has no instance to verify"
            return
        check = VerifierCode(
            code=code,
            task_key=self.config.task_key,
            final_answer=episode.answer,
            conversation=self.conversation,
            env_key=self.config.env_key,
            instance_id=ground.instance.id,
        )
        with self._telemetry.span("env.verify", sha256=check.sha256) as span:
            try:
                done = await self._judge(check, ground.instance.databases)
            except (Error, OSError, TimeoutError) as error:
                episode.unjudged = f"verifier of task {self.config.task_key or '(unnamed)'} could not be run: {error}"
                return
            episode.judged = done
            episode.reward = partial(done.score, done.stdout) if self.partial_reward else done.score
            span.mark_found(reward=episode.reward)

    async def _release(self) -> None:
        ground, self._ground = self._ground, None
        if ground is not None:
            await asyncio.shield(asyncio.ensure_future(ground.release()))
