"""The table of agents in `docs/agents.md`, made from the values themselves so that it cannot say anything else."""

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
    "root",
    "isolation",
    "switched off",
)


def table(agents: Iterable[Agent]) -> str:
    """Markdown, one line per agent."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(agent) for agent in agents)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
        agent.root,
        agent.needs_isolation or "any",
        ", ".join(agent.off) or "-",
    )
