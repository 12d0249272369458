"""`RemoteEpisode`: one attempt at a remote task on its instance. It offers the tools, keeps what went wrong with them and the
answer that was handed in, and is judged by the task's verifier code once.

There is one implementation of this. `TaskEnv` drives it by hand, step by step; a rollout gives its tools to an agent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rollyard.core.errors import EnvError, EnvUnavailable, EpisodeLost, Error
from rollyard.core.message import ToolSpec
from rollyard.core.remote_task import SUBMIT, TaskConfig
from rollyard.envs.fleet.databases import Databases
from rollyard.envs.fleet.partial_reward import partial
from rollyard.envs.fleet.task_instance import TaskInstance
from rollyard.envs.fleet.verifier_code import Checked, VerifierCode
from rollyard.envs.telemetry import Telemetry
from rollyard.tools.answers import ToolAnswer

Judge = Callable[[VerifierCode, Databases | None], Awaitable[Checked]]
SUBMIT_TOOL = ToolSpec(
    name=SUBMIT,
    description="Hand in the final answer. This ends the task.",
    schema=msgspec.json.encode(
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "the answer"}},
            "required": ["answer"],
        }
    ).decode(),
)


class RemoteEpisode:
    """`unjudged` is why the verifier was not even run, `judged` what it gave; `reward` is None unless that is a score."""

    def __init__(
        self, config: TaskConfig, task_instance: TaskInstance, telemetry: Telemetry, *, partial_reward: bool = False
    ) -> None:
        self.config, self.task_instance = config, task_instance
        self.answer: str | None = None
        self.tool_errors: list[str] = []
        self.judged: Checked | None = None
        self.unjudged: str | None = None
        self.reward: float | None = None
        self._unreached: EnvError | None = None  # why the instance did not answer the last call
        self._telemetry, self._partial = telemetry, partial_reward

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools of the task's modality, and the one that takes an answer where the prompt names it."""
        if not self.config.wants_answer:
            return list(self.task_instance.specs)
        return [*(spec for spec in self.task_instance.specs if spec.name != SUBMIT), SUBMIT_TOOL]

    @property
    def reward_computed(self) -> bool:
        return self.judged is not None or self.unjudged is not None

    @property
    def verifier_stdout(self) -> str:
        return self.judged.stdout if self.judged is not None else ""

    @property
    def verifier_error(self) -> str | None:
        return self.judged.error if self.judged is not None else self.unjudged

    async def use(self, name: str, params: Mapping[str, Any]) -> ToolAnswer:
        """One tool call. What fails is an answer, too, and is kept in `tool_errors`. After the answer there are no more."""
        if self.answer is not None:
            return self._fail("the task is over: its answer was handed in")
        if name == SUBMIT and self.config.wants_answer:
            given = params.get("answer", "")
            self.answer = given if isinstance(given, str) else msgspec.json.encode(given).decode()
            return ToolAnswer(value=None, text="The answer was handed in.")
        known = [spec.name for spec in self.task_instance.specs]
        if name not in known:
            return self._fail(f"there is no tool named {name!r}; known: {', '.join(known)}")
        assert self.task_instance.tools is not None
        try:
            with self._telemetry.span("env.call", tool=name):
                answer = await self.task_instance.tools.ask(name, params)
        except EnvError as error:
            self._unreached = error if isinstance(error, EnvUnavailable | EpisodeLost) else None
            return self._fail(error.message)
        self._unreached = None
        if answer.is_error:
            self.tool_errors.append(answer.text)
        return answer

    def _fail(self, words: str) -> ToolAnswer:
        self.tool_errors.append(words)
        return ToolAnswer(value={"error": words}, text=words, is_error=True)

    def check(self, code: str, conversation: list[Any] | None) -> VerifierCode:
        return VerifierCode(
            code=code,
            task_key=self.config.task_key,
            final_answer=self.answer,
            conversation=conversation,
            env_key=self.config.env_key,
            instance_id=self.task_instance.instance.id,
        )

    async def verify(self, judge: Judge, conversation: list[Any] | None = None) -> None:
        """Sets the reward, or why there is none. A sandbox or an instance that fails raises: that is no score. So does an
        instance that the agent could not reach any more when it called last, whatever the verifier would make of that."""
        code, name = self.config.verifier_code, self.config.task_key or "(unnamed)"
        if not code:
            self.unjudged = f"task {name} has no verifier"
            return
        if (lost := self._unreached) is not None:
            self.unjudged = f"instance {self.task_instance.instance.id} of task {name} was lost: {lost.message}"
            raise EpisodeLost(self.unjudged) from lost
        check = self.check(code, conversation)
        with self._telemetry.span("env.verify", sha256=check.sha256) as span:
            try:
                done = await judge(check, self.task_instance.instance.databases)
            except (Error, OSError, TimeoutError) as error:
                self.unjudged = f"verifier of task {name} could not be run: {error}"
                raise
            self.judged = done
            self.reward = partial(done.score, done.stdout) if self._partial else done.score
            span.mark_found(reward=self.reward)
