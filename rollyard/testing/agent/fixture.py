"""What a case stands on: one agent, one backend, and a way to run the agent once on a scripted model and look at everything
that happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.agent import Agent
from rollyard.core.call import Call, Reply
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.policy import scripted
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.testing.suite import check

WRITE = {"shell": "echo hello > out.txt"}
DONE = {"text": "done"}
HELLO = 'test "$(cat out.txt)" = hello'
LIMITS = Limits(install=1500, agent=150, idle=60)

Script = Sequence[Mapping[str, Any]] | Mapping[str, Any] | Callable[[Call], Any] | Policy


class Witness:
    """A policy that asks another, and keeps each call and its answer. `noticed` is called with the rollout of every call."""

    def __init__(self, policy: Policy, noticed: Callable[[str], None]) -> None:
        self._policy, self._noticed = policy, noticed
        self.calls: list[Call] = []
        self.replies: list[Reply] = []

    async def __call__(self, call: Call) -> Reply:
        self.calls.append(call)
        self._noticed(call.rollout_id)
        reply = await self._policy(call)
        self.replies.append(reply)
        return reply

    async def closed(self, rollout_id: str) -> None:
        await self._policy.closed(rollout_id)

    async def aclose(self) -> None:
        await self._policy.aclose()


class AgentRun(msgspec.Struct, frozen=True):
    """One run of the agent, with the calls its model was asked."""

    rollout: Rollout
    calls: list[Call]
    replies: list[Reply]

    @property
    def text(self) -> str:
        """All that the model was shown in the first call of the agent itself."""
        first = next((call for call in self.calls if call.kind == "agent"), None)
        return "" if first is None else "\0".join(message.text for message in first.messages)

    def check_solved(self) -> None:
        done = self.rollout
        problem = done.failure.message if done.failure else ""
        check(done.failure is None, f"{problem}; it printed: {done.log_tail[-400:]!r}")
        check(done.reward == 1.0, f"out.txt is not as asked; it printed: {done.log_tail[-400:]!r}")


class AgentFixture:
    """`user` runs the agent as that user of the image; None means the image's own, mostly root. `key` is the gate's key of
    the latest run."""

    def __init__(
        self, *, agent: Agent, backend: Backend, user: str | None = None, provision: Provision | None = None
    ) -> None:
        self.agent, self.backend, self.user = agent, backend, user
        self.provision = provision or Provision()
        self.key = ""

    def script(self, *steps: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Steps for this agent: one that reads edits is told the same one whatever turn it thinks it is."""
        return [WRITE] * 6 if self.agent.acts_by == "edits" else list(steps)

    async def run(
        self, script: Script | None = None, instruction: str = "Write hello into out.txt.", **options: Any
    ) -> AgentRun:
        """The agent once on `script`; `options` are those of `run_rollout`."""
        source: Any = self.script(WRITE, DONE) if script is None else script
        policy: Policy = source if hasattr(source, "aclose") else scripted(source)
        async with Gate(policy) as gate:

            def noticed(rollout_id: str) -> None:
                self.key = gate.sessions[rollout_id].key or ""

            witness = Witness(policy, noticed)
            task = Task(id="conformance", instruction=instruction, user=self.user)
            given: dict[str, Any] = {"verify": [HELLO], "limits": LIMITS, "provision": self.provision, **options}
            done = await run_rollout(task, agent=self.agent, policy=witness, sandbox=self.backend, gate=gate, **given)
        return AgentRun(done, witness.calls, witness.replies)
