"""What a Fleet job's session does: one rollout of a remote task, by the one function that runs rollouts.

The task's environment is the instance that the job made. Its tools reach the agent through the gate and its verifier judges, as
with any remote task (`runs/rollout/remote.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.errors import EnvError, UnknownName
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Policy
from rollyard.core.remote_task import TaskConfig
from rollyard.core.rollout import Rollout
from rollyard.envs.fleet.databases import Databases
from rollyard.envs.fleet.provider import InstanceRequest
from rollyard.envs.fleet.verifier_code import TIMEOUT_S, Checked
from rollyard.plane.compat.fleet.instances import WorldInstance
from rollyard.plane.compat.fleet.jobs import JobAttempt, JobOutcome
from rollyard.runs.rollout.remote import transcript
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.store import Store

_LEAST_S = 30.0
_TOOL_AGENT = "tool-agent"
_OWN = {None: _TOOL_AGENT, "tool-use": _TOOL_AGENT}


class RolloutRunner:
    """`backend` is where agents run and verifiers judge; `url` is where this server's Fleet API is, and `token` opens the tools
    of one instance of it."""

    def __init__(
        self, policy: Policy, *, backend: Backend, store: Store | None, url: str, token: Callable[[str], str]
    ) -> None:
        self._policy, self._backend, self._store = policy, backend, store
        self._url, self._token = url, token

    async def __call__(self, attempt: JobAttempt) -> JobOutcome:
        place, task = attempt.place, attempt.task
        config = TaskConfig(
            env_key=place.world.key, task_key=task.key, prompt=task.prompt, verifier_code=task.verifier_func
        )
        done = await run_rollout(
            config,
            agent=_agent(attempt.harness),
            policy=self._policy,
            model=attempt.model.partition("/")[2],
            sandbox=self._backend,
            provider=_MadeAlready(place, f"{self._url}/i/{place.id}/", self._token(place.id)),
            system_prompt=attempt.system_prompt,
            max_calls=attempt.max_steps,
            limits=Limits(agent=max(_LEAST_S, attempt.seconds - TIMEOUT_S), verify=TIMEOUT_S),
            labels={"fleet.job": attempt.job_id, "fleet.instance": place.id, "fleet.model": attempt.model},
            store=self._store,
            rollout_id=attempt.rollout_id,
        )
        failure = done.failure
        if failure is not None and not failure.trainable:  # a score would be one of the machinery, not of the model
            raise EnvError(f"the rollout failed at {failure.boundary}: {failure.message}")
        error = failure.message if failure is not None else None
        return JobOutcome(
            steps=done.calls, transcript=transcript(done), checked=_read_check(done, task.verifier_func), error=error
        )


def _read_check(done: Rollout, code: str | None) -> Checked | None:
    """The verdict as the check that it came from."""
    verdict = done.verdict
    if verdict is None or not code:
        return None
    return Checked(
        score=verdict.reward,
        sha256=hashlib.sha256(code.encode()).hexdigest(),
        seconds=sum(stage.duration_s for stage in done.stages if stage.name == "verify"),
        result=verdict.reward,
        stdout=verdict.log,
        error=verdict.error,
    )


class _MadeAlready:
    """A provider of one instance, which its job made and will close."""

    name = "job"

    def __init__(self, place: WorldInstance, url: str, key: str) -> None:
        self.id, self.tools_key = place.id, key
        self.tool_urls: Sequence[str] = (url,)
        self.page_url: str | None = None
        self.databases: Databases = place.databases

    async def make(self, request: InstanceRequest) -> _MadeAlready:
        return self

    async def reset(self, *, seed: int | None, timeout_s: float) -> None:
        """It is new."""

    async def close(self) -> None:
        """Its job does it."""

    async def aclose(self) -> None:
        """There is no connection."""


def _agent(harness: str | None) -> Agent:
    """Only agents by name: a client does not say what is imported here."""
    name = _OWN.get(harness, harness)
    if name not in agents.names():
        raise UnknownName("harness", str(name), ["tool-use", *agents.names()])
    return agents.get(name)
