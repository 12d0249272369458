"""OpenEnv's `ResourceSession` and `ResourceSessionFactory`: a rollout of any agent as a session that TRL's harness worker
(or anything else that speaks OpenEnv) creates, waits for, asks for its trace, verifies and closes.

    factory = SessionFactory(agent="opencode", policy=policy, sandbox="local", verify=["pytest -q"])
    HarnessRolloutWorker(harness_session_factory=lambda **_: factory, ...)

The agent owns its loop, so that a session has no tools to call and no step to take. Its reward is the verifier's; nothing
the trainer says can set one. The package itself is imported when a factory is made. docs/trainers.md has what each method does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rollyard import agents, sync
from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.ids import new_id, secret
from rollyard.core.rollout import Rollout
from rollyard.core.task import McpServer, Task
from rollyard.gate import Gate
from rollyard.policy.queue import Queue
from rollyard.runs.rollout.plan import StagePauses, check_mode
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.rows import as_task
from rollyard.tools import Toolset
from rollyard.train.adapters.openenv import proxy_trace, training_trace
from rollyard.train.session_trainer import Handler, SessionTrainer
from rollyard.train.stepwise_rollout import StepwiseRollout


class SessionFactory:
    """`options` are those of `rollyard.run_rollout`; a policy or gate that is shared must live on the loop of
    `rollyard.sync`. With `start` False a session waits for its `start_agent`. `hold_s` is how long it waits for its caller: to
    be started, to be judged, to be closed."""

    def __init__(self, *, start: bool = True, hold_s: float = 3600.0, **options: Any) -> None:
        rollouts = openenv_module("rollout")
        rollouts.ResourceSession.register(OpenEnvSession)
        rollouts.ResourceSessionFactory.register(SessionFactory)
        if options.get("mode") is not None:
            check_mode(options["mode"])
        if options.get("mode") == "interception_gate" and options.get("policy") in (None, "queue"):
            options["policy"] = Queue()
        self._start, self._hold_s = start, hold_s
        self._options = options

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> OpenEnvSession:
        """`task` is an instruction, a dataset row, a `Task`, or chat messages whose last user message is the instruction.
        Returns when the agent runs (with `start` False: when it could), and raises what failed, which then has left nothing."""
        options = {**self._options, "seed": seed, "episode_id": episode_id}
        session = OpenEnvSession(_task(task), options, hold_s=self._hold_s)
        try:
            session.wait_prepared()
            if self._start:
                session.start_agent()
        except BaseException:  # Ctrl-C too: a session that was not handed out is closed
            session.close()
            raise
        return session


class OpenEnvSession:
    """One rollout. All methods block, as OpenEnv's do, but for the trainer's two. `trainer` is the trainer's half, None where
    no call is held."""

    def __init__(self, task: Task, options: Mapping[str, Any], *, hold_s: float = 3600.0) -> None:
        self.task = task
        self.id = options.get("rollout_id") or new_id("ro")
        self._options: dict[str, Any] = {**options, "rollout_id": self.id}
        self._started = self._closed = False
        self.trainer: SessionTrainer | None = None
        queue = options.get("policy")
        if isinstance(queue, Queue):
            tools = options.get("tools", ())
            offered = Toolset(tools.tools.values() if isinstance(tools, Toolset) else tools)
            self._options["tools"] = offered
            self.trainer = SessionTrainer(queue, self.id, offered)
        self._steps = StepwiseRollout(self._run, hold_s=hold_s)

    async def _run(self, pauses: StagePauses) -> Rollout:
        gate, trainer = self._options.get("gate"), self.trainer
        if trainer is None:
            return await run_rollout(self.task, pauses=pauses, **self._options)
        if gate is not None:
            trainer.url, trainer.key = gate.url, gate.trainer_key
            return await run_rollout(self.task, pauses=pauses, **self._options)
        queue, store = self._options["policy"], self._options.get("store")
        async with Gate(queue, host="127.0.0.1", trainer_key=secret("rt"), log=store) as gate:
            trainer.url, trainer.key = gate.url, gate.trainer_key
            options: dict[str, Any] = {**self._options, "gate": gate}
            return await run_rollout(self.task, pauses=pauses, **options)

    def wait_prepared(self) -> None:
        self._steps.require("prepared")

    def start_agent(self) -> None:
        """Starts it once, however often it is called, and returns when it runs."""
        self._started = True
        self._steps.go("prepared")
        self.wait_started()

    def wait_started(self, timeout_s: float | None = None) -> None:
        self._steps.require("started", timeout_s)

    @property
    def sandbox(self) -> Any:
        """The agent's sandbox with blocking methods, until `close`; the agent itself is dead once it has ended."""
        if self._closed or self._steps.sandbox is None:
            raise EnvError("the session's sandbox is closed", rollout_id=self.id)
        return sync.wrap(self._steps.sandbox)

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.task.instruction}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        error = f"no tool {name!r}: the agent runs its own loop in its sandbox"
        return openenv_module("rollout").ToolResult(error=error)

    # the trainer's, in `interception_gate`

    async def next_request(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """`SessionTrainer.next_request`."""
        return await self._trainer("next_request").next_request(timeout_s)

    async def deliver(self, intercept: Mapping[str, Any], response: Any) -> None:
        """`SessionTrainer.deliver`."""
        await self._trainer("deliver").deliver(intercept, response)

    def register_tool_handler(
        self, name: str, handler: Handler, tool_definition: Mapping[str, Any] | None = None
    ) -> None:
        """Before the agent starts, which asks for its tools once: `SessionTrainer.add_tool`."""
        trainer = self._trainer("register_tool_handler")
        if self._started:
            raise ConfigError("the agent runs and has read its list of tools", hint="SessionFactory(start=False, ...)")
        agent = self._options.get("agent", "opencode")
        agents.refuse(agents.get(agent) if isinstance(agent, str) else agent, {"mcp": (McpServer(name="rollyard"),)})
        trainer.add_tool(name, handler, tool_definition)

    def _trainer(self, method: str) -> SessionTrainer:
        if self.trainer is None:
            raise ConfigError(f"{method} needs a session whose calls are held", hint="mode='interception_gate'")
        return self.trainer

    # its end

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code when it has ended, before it is judged. `TimeoutError` where it ran out of its time or the
        wait did; then `close` ends it."""
        rollout = self.rollout(timeout_s)
        if rollout.status == "timeout":
            raise TimeoutError(rollout.error or "the agent ran out of time")
        if rollout.exit_code is None:
            raise EnvError(f"the agent has no exit code: {rollout.error or rollout.status}", rollout_id=rollout.id)
        return rollout.exit_code

    def fetch_trace(self) -> str:
        """All that the agent has printed until now, without a bound."""
        return self._steps.printed().decode("utf-8", "backslashreplace")

    def fetch_proxy_trace(self) -> list[dict[str, Any]]:
        """One `TraceEntry` per call that was answered; [] in `black_box`, where no call was read."""
        return proxy_trace(self.rollout())

    def fetch_training_trace(self) -> Any:
        """A validated `TrainingTrace`; `Untrainable` where no token of the rollout can be proved."""
        return openenv_module("training").TrainingTrace.model_validate(training_trace(self.rollout()))

    def verify(self, transcript: Sequence[Mapping[str, Any]], final_state: Any | None = None) -> Any:
        """Runs the task's verifier, once, and gives what it said: `env_reward` is None where there is none or it failed, and
        never a zero for that."""
        rollout = self.judge()
        parts = dict(rollout.verdict.parts) if rollout.verdict is not None else {}
        return openenv_module("rollout").VerifyResult(
            env_reward=rollout.reward,
            done=True,
            metrics={**parts, "calls": rollout.calls, "wall_s": rollout.wall_s},
            artifacts={"rollout_id": rollout.id, "status": rollout.status, "error": rollout.error},
        )

    def judge(self) -> Rollout:
        """The rollout with its verdict."""
        self.rollout()
        if self._closed and not self._steps.judged:
            raise EnvError("the session was closed before it was judged", rollout_id=self.id)
        self._steps.go("ended")
        return self._steps.reach("over")

    def end_agent(self) -> None:
        """Ends the agent alone; what it did until now can be judged."""
        sync.wait(self.sandbox.value.kill_processes())

    def close(self) -> None:
        """Ends the agent, its relay and its sandbox if they still run; a second close does nothing."""
        self._closed = True
        self._steps.end()

    def rollout(self, timeout_s: float | None = None) -> Rollout:
        """The rollout itself when the agent has ended, with its verdict once it was judged."""
        if not self._started:
            raise ConfigError("the agent was not started", hint="call start_agent() first")
        return self._steps.reach("ended", timeout_s)


def openenv_module(module: str) -> Any:
    try:
        return import_module(f"openenv.core.harness.{module}")
    except ImportError as error:
        raise ConfigError("OpenEnv sessions need the package 'openenv'", hint="pip install openenv==0.10.0") from error


def _task(task: Any) -> Task:
    if isinstance(task, Sequence) and not isinstance(task, str):
        prompts = [message["content"] for message in task if message.get("role") == "user"]
        if not prompts:
            raise ConfigError("the messages of a task have no user message")
        task = prompts[-1]
    return as_task(task)
