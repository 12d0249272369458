"""What a Fleet job's session does: one rollout, by the one function that runs rollouts, in the agent's own sandbox.

The instance's tools are offered to the agent through the gate, so that the agent reaches nothing else. The verifier runs when
the agent is dead, in a sandbox of its own, over the instance's databases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.errors import EnvError, UnknownName
from rollyard.core.limits import Limits
from rollyard.core.message import Message
from rollyard.core.protocols import Backend, Policy, Sandbox
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.envs.fleet.task_config import SUBMIT
from rollyard.envs.fleet.verifier_code import TIMEOUT_S, Checked, VerifierCode, run_check
from rollyard.plane.compat.fleet.jobs import JobAttempt, JobOutcome
from rollyard.plane.compat.fleet.tool_agent import tool_agent
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.store import Store
from rollyard.tools import RemoteTools, Tool, tool
from rollyard.tools.bridge import bridge

_FIRST_ATTEMPTS = 5
_CALL_S = 60.0
_LEAST_S = 30.0
_OWN = {"tool-use": tool_agent, tool_agent.name: tool_agent}


class RolloutRunner:
    """`backend` is where agents run, `checks` where verifiers do; `url` is where this server's Fleet face is, and `token` opens
    the tools of one instance of it."""

    def __init__(
        self,
        policy: Policy,
        *,
        backend: Backend,
        checks: Backend,
        store: Store | None,
        url: str,
        token: Callable[[str], str],
    ) -> None:
        self._policy, self._backend, self._checks, self._store = policy, backend, checks, store
        self._url, self._token = url, token

    async def __call__(self, attempt: JobAttempt) -> JobOutcome:
        place, task = attempt.place, attempt.task
        judging = _Judging(attempt, self._checks)
        async with RemoteTools([f"{self._url}/i/{place.id}/"], self._token(place.id), timeout_s=_CALL_S) as remote:
            offered = [
                bridge(spec, remote.ask, timeout_s=_CALL_S) for spec in await remote.list(attempts=_FIRST_ATTEMPTS)
            ]
            if SUBMIT in task.prompt:
                offered = [*(one for one in offered if one.name != SUBMIT), judging.submit()]
            seconds = max(_LEAST_S, attempt.seconds - TIMEOUT_S)
            done = await run_rollout(
                Task(id=task.key, instruction=task.prompt),
                agent=_agent(attempt.harness),
                policy=self._policy,
                model=attempt.model.partition("/")[2],
                sandbox=self._backend,
                tools=offered,
                verifier=judging,
                system_prompt=attempt.system_prompt,
                max_calls=attempt.max_steps,
                limits=Limits(agent=seconds, verify=TIMEOUT_S),
                labels={"fleet.job": attempt.job_id, "fleet.instance": place.id, "fleet.model": attempt.model},
                store=self._store,
                rollout_id=attempt.rollout_id,
            )
        if (
            done.failure is not None and not done.failure.trainable
        ):  # a score would be one of the machinery, not of the model
            raise EnvError(f"the rollout failed at {done.failure.boundary}: {done.failure.message}")
        error = done.failure.message if done.failure is not None else None
        return JobOutcome(steps=done.calls, transcript=transcript(done), checked=judging.checked, error=error)


class _Judging:
    """The task's verifier code as a `Verifier`, and the answer that the agent handed in."""

    def __init__(self, attempt: JobAttempt, backend: Backend) -> None:
        self._attempt, self._backend = attempt, backend
        self._answer: str | None = None
        self.checked: Checked | None = None

    def submit(self) -> Tool:
        @tool(name=SUBMIT, description="Hand in the final answer. This ends the task.")
        async def submitted(answer: str) -> str:
            self._answer = answer
            return "The answer was handed in."

        return submitted

    async def __call__(self, sandbox: Sandbox, rollout: Rollout) -> Verdict:
        task, place = self._attempt.task, self._attempt.place
        if not task.verifier_func:
            return Verdict(status="none", error=f"task {task.key} has no verifier")
        check = VerifierCode(
            code=task.verifier_func,
            task_key=task.key,
            final_answer=self._answer,
            conversation=list(transcript(rollout)),
            env_key=place.world.key,
            instance_id=place.id,
        )
        done = self.checked = await run_check(self._backend, check, place.databases, timeout_s=TIMEOUT_S)
        if done.score is None:
            return Verdict(status="failed", error=done.error, log=done.stdout)
        return Verdict(reward=done.score, log=done.stdout)


def _agent(harness: str | None) -> Agent:
    """Only agents by name: a client does not say what is imported here."""
    name = harness or tool_agent.name
    if name not in _OWN and name not in agents.names():
        raise UnknownName("harness", name, [*_OWN, *agents.names()])
    return _OWN[name] if name in _OWN else agents.get(name)


def transcript(rollout: Rollout) -> tuple[dict[str, Any], ...]:
    """The longest conversation of the rollout, as OpenAI messages."""
    branches = rollout.trajectory.branches if rollout.trajectory is not None else ()
    longest = max((branch.messages for branch in branches), key=len, default=())
    return tuple(line for message in longest for line in _lines(message))


def _lines(message: Message) -> list[dict[str, Any]]:
    if message.tool_results:
        return [
            {
                "role": "tool",
                "tool_call_id": result.call_id,
                "content": "".join(getattr(p, "text", "") for p in result.parts),
            }
            for result in message.tool_results
        ]
    line: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        line["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return [line]
