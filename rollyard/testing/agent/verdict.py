"""The suite on an agent that is named: what `rollyard check agent` runs, and the figures of one plain run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.sandbox import backend as open_backend
from rollyard.testing.agent import check_agent
from rollyard.testing.agent.fixture import AgentFixture
from rollyard.testing.agent.model import odd_answers, rewrites
from rollyard.testing.suite import CaseOutcome


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One two-turn run. `agent_s` is the agent's own wall time, `overhead_s` everything before and after it (sandbox, files,
    stopping, collecting, judging). `rewrites` are the parts of the model's answers that it sends back spelled otherwise."""

    wall_s: float
    agent_s: float
    overhead_s: float
    calls: int
    branches: int
    rewrites: tuple[str, ...] = ()


class AgentTotals(msgspec.Struct, frozen=True, kw_only=True):
    agent: str
    version: str | None
    backend: str
    passed: int
    skipped: int
    failed: int
    outcomes: tuple[CaseOutcome, ...]
    figures: Figures | None = None

    @property
    def line(self) -> str:
        what = f"{self.agent} {self.version or ''} on {self.backend}"
        return f"{what}: {self.passed} passed, {self.skipped} skipped, {self.failed} failed"


class AgentCheck:
    def __init__(self, fixture: AgentFixture) -> None:
        self._fixture = fixture
        self._seen: list[CaseOutcome] = []
        self._figures: Figures | None = None

    async def outcomes(self, *, only: str | None = None, slow: bool = False) -> AsyncIterator[CaseOutcome]:
        async for outcome in check_agent(self._fixture, only=only, slow=slow):
            self._seen.append(outcome)
            yield outcome

    async def measure(self) -> Figures:
        """A warm-up, a run that is timed, and one that looks at what comes back."""
        await self._fixture.run()
        done = (await self._fixture.run()).rollout
        agent_s = sum(stage.duration_s for stage in done.stages if stage.name == "wait")
        changed = rewrites(await self._fixture.run(odd_answers)) if self._fixture.agent.acts_by == "tools" else ()
        self._figures = Figures(
            wall_s=done.wall_s,
            agent_s=agent_s,
            overhead_s=done.wall_s - agent_s,
            calls=done.calls,
            branches=len(done.captured.branches),
            rewrites=changed,
        )
        return self._figures

    def totals(self) -> AgentTotals:
        count = {result: sum(o.result == result for o in self._seen) for result in ("passed", "skipped", "failed")}
        agent = self._fixture.agent
        return AgentTotals(
            agent=agent.name,
            version=agent.version,
            backend=self._fixture.backend.name,
            **count,
            outcomes=tuple(self._seen),
            figures=self._figures,
        )


@contextlib.asynccontextmanager
async def examine_agent(
    name: str | Agent, sandbox: str = "local", user: str | None = None
) -> AsyncGenerator[AgentCheck]:
    """An agent by name, dotted path or TOML file, in a sandbox of this backend."""
    agent = agents.get(name)
    async with open_backend(sandbox) as backend:
        yield AgentCheck(AgentFixture(agent=agent, backend=backend, user=user))
