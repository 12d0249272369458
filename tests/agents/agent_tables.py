"""The tables of agents in `docs/agents.md`, made from the values themselves so that they cannot say anything else."""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.core.agent import Agent

_HEAD = (
    "agent",
    "version",
    "installs",
    "dialects",
    "options",
    "MCP",
    "sub-agents",
    "resumes",
    "root",
    "isolation",
    "switched off",
)

_ASKED = ("system_prompt", "disabled_tools", "mcp")
_OF_CALLS = ("disable_thinking", "max_tokens", "seed")


def table(agents: Iterable[Agent]) -> str:
    """Markdown, one line per agent."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(agent) for agent in agents)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def option_table(agents: Iterable[Agent]) -> str:
    """Markdown: who acts on each option, for every agent that calls a model."""
    head = ("agent", *_ASKED, *_OF_CALLS, "tools that can be disabled")
    rows = [head, tuple("---" for _ in head), *(_option_row(agent) for agent in agents if agent.calls_model)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _option_row(agent: Agent) -> tuple[str, ...]:
    asked = ("the agent" if name in agent.switches else "refused" for name in _ASKED)
    calls = ("the gate, or the agent" if name in agent.switches else "the gate" for name in _OF_CALLS)
    tools = ", ".join(f"`{name}`" for name in agent.tools) if "disabled_tools" in agent.switches else "-"
    return (f"`{agent.name}`", *asked, *calls, tools)


def _row(agent: Agent) -> tuple[str, ...]:
    layer = agent.layer
    needs = [f"Node {layer.node}" if layer.node else "", f"Python {layer.python}" if layer.python else ""]
    installs = ", ".join([*(f"`{name}`" for name in (*layer.npm, *layer.pip)), *filter(None, needs)])
    return (
        f"`{agent.name}`",
        agent.version or "-",
        installs or "nothing",
        ", ".join(agent.wires) or "calls no model",
        ", ".join(agent.options) or "-",
        ", ".join(agent.mcp.transports) if agent.mcp else "none",
        f"`{agent.subagent.tool}`" if agent.subagent else "none",
        "yes" if agent.resume else "no",
        agent.root,
        agent.needs_isolation or "any",
        ", ".join(agent.off) or "-",
    )
