"""The agent conformance suite: what an agent must do in a sandbox, through the gate, on a model that follows a script.

async with ry.sandbox.backend("local") as backend:
    async for outcome in check_agent(AgentFixture(agent=ry.agents.get("pi"), backend=backend)):
        print(outcome.id, outcome.result, outcome.why)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import get_args

from rollyard.core.agent import Switch
from rollyard.testing.agent import basics, hygiene, model, options, tools, witness
from rollyard.testing.agent.fixture import AgentFixture as AgentFixture
from rollyard.testing.suite import Case, CaseOutcome, run_case


def cases() -> list[Case[AgentFixture]]:
    """All of them, in the order of the files."""
    modules = (basics, options, witness, tools, model, hygiene)
    return [value for module in modules for value in vars(module).values() if isinstance(value, Case)]


def missing(fixture: AgentFixture) -> set[str]:
    """What this agent says it does not have."""
    agent = fixture.agent
    has = {
        "model": agent.dialect is not None,
        "shell": agent.acts_by != "edits",
        "tools": agent.acts_by == "tools",
        "mcp": agent.mcp is not None,
        "mcp_http": agent.mcp is not None and "http" in agent.mcp.transports,
        "subagents": agent.subagent is not None,
        "artifacts": bool(agent.artifacts),
        **{name: name in agent.options for name in get_args(Switch)},
        "says_done": agent.says_done,
    }
    return {name for name, present in has.items() if not present}


async def check_agent(
    fixture: AgentFixture, *, only: str | None = None, slow: bool = False
) -> AsyncIterator[CaseOutcome]:
    """Outcomes as they come. `only` is a letter or an id: `M` for the model's moods, `W1` for one case."""
    for case in cases():
        if only is None or case.id == only or case.id.rstrip("0123456789") == only:
            yield await run_case(case, fixture, missing=missing(fixture), slow=slow)
