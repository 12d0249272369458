"""tool-agent: the loop of shell-agent over the tools of MCP servers, and no others. For tasks whose tools are elsewhere."""

from __future__ import annotations

from msgspec.structs import replace

from rollyard.agents.shell_agent import PROMPT
from rollyard.agents.shell_agent import agent as shell_agent
from rollyard.core.agent import Mcp

_SERVERS = "{home}/.shell-agent/mcp.json"

agent = replace(
    shell_agent,
    name="tool-agent",
    summary="our own: the same loop over the tools of MCP servers alone",
    argv=(*shell_agent.argv, _SERVERS),
    files={**shell_agent.files, PROMPT: "Do the task with the tools. Say done when done."},
    resume=None,  # what its servers remember is not in its session
    mcp=Mcp(style="claude", file=_SERVERS, secret="${ROLLYARD_KEY}", transports=("http",)),  # noqa: S106 - a reference
)
