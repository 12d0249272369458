"""OpenEnv's `ResourceSession` and `ResourceSessionFactory`: a rollout of any agent as a session that TRL's harness worker
(or anything else that speaks OpenEnv) creates, waits for, asks for its trace, verifies and closes.

    factory = SessionFactory(agent="opencode", policy=policy, sandbox="local", verify=["pytest -q"])
    HarnessRolloutWorker(harness_session_factory=lambda **_: factory, ...)

The agent owns its loop, so that a session has no tools to call and no step to take. Its reward is the verifier's; nothing
the trainer says can set one. The package itself is imported when a factory is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.rows import as_task
from rollyard.train.adapters.openenv import proxy_trace, training_trace
from rollyard.train.background import BackgroundWork

CLOSING_S = 60.0


class SessionFactory:
    """`options` are those of `rollyard.run_rollout`; a policy or gate that is shared must live on the loop of
    `rollyard.sync`. With `start` False a session waits for its `start_agent`."""

    def __init__(self, *, start: bool = True, **options: Any) -> None:
        rollouts = _openenv("rollout")
        rollouts.ResourceSession.register(OpenEnvSession)
        rollouts.ResourceSessionFactory.register(SessionFactory)
        self._start = start
        self._options = options

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> OpenEnvSession:
        """`task` is an instruction, a dataset row, a `Task`, or chat messages whose last user message is the instruction."""
        session = OpenEnvSession(_task(task), {**self._options, "seed": seed, "episode_id": episode_id})
        if self._start:
            session.start_agent()
        return session


class OpenEnvSession:
    """One rollout. All methods block, as OpenEnv's do."""

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self.task = task
        self._options = options
        self._work: BackgroundWork[Rollout] | None = None

    def start_agent(self) -> None:
        """Starts it once, however often it is called."""
        if self._work is None:
            self._work = BackgroundWork(run_rollout(self.task, **self._options))

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.task.instruction}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        error = f"no tool {name!r}: the agent runs its own loop in its sandbox"
        return _openenv("rollout").ToolResult(error=error)

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code. `TimeoutError` where it ran out of its time or the wait did; then `close` ends it."""
        rollout = self.rollout(timeout_s)
        if rollout.status == "timeout":
            raise TimeoutError(rollout.error or "the agent ran out of time")
        if rollout.exit_code is None:
            raise EnvError(f"the agent has no exit code: {rollout.error or rollout.status}", rollout_id=rollout.id)
        return rollout.exit_code

    def fetch_trace(self) -> str:
        """All that the agent printed; of more than 8 MiB the beginning and the end."""
        return self.rollout().log.decode("utf-8", "backslashreplace")

    def fetch_proxy_trace(self) -> list[dict[str, Any]]:
        """One `TraceEntry` per call; [] in `black_box`, where no call was seen."""
        return proxy_trace(self.rollout())

    def fetch_training_trace(self) -> Any:
        """A validated `TrainingTrace`; `Untrainable` where no token of the rollout can be proved."""
        return _openenv("training").TrainingTrace.model_validate(training_trace(self.rollout()))

    def verify(self, transcript: Sequence[Mapping[str, Any]], final_state: Any | None = None) -> Any:
        """What the task's verifier said: `env_reward` is None where there is none or it failed, and never a zero for that."""
        rollout = self.rollout()
        parts = dict(rollout.verdict.parts) if rollout.verdict is not None else {}
        return _openenv("rollout").VerifyResult(
            env_reward=rollout.reward,
            done=True,
            metrics={**parts, "calls": rollout.calls, "wall_s": rollout.wall_s},
            artifacts={"rollout_id": rollout.id, "status": rollout.status},
        )

    def close(self) -> None:
        """Ends the agent, its relay and its sandbox if they still run; a second close does nothing."""
        if self._work is not None and not self._work.over:
            self._work.end(CLOSING_S)

    def rollout(self, timeout_s: float | None = None) -> Rollout:
        """The finished rollout itself."""
        if self._work is None:
            raise ConfigError("the agent was not started", hint="call start_agent() first")
        return self._work.result(timeout_s)


def _openenv(module: str) -> Any:
    try:
        return import_module(f"openenv.core.harness.{module}")
    except ImportError as error:
        raise ConfigError("OpenEnv sessions need the package 'openenv'", hint="pip install openenv==0.10.0") from error


def _task(task: Any) -> Task:
    if isinstance(task, Sequence) and not isinstance(task, str):
        asked = [message["content"] for message in task if message.get("role") == "user"]
        if not asked:
            raise ConfigError("the messages of a task have no user message")
        task = asked[-1]
    return as_task(task)
