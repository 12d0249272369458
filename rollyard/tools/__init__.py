"""Tools: functions on the host's side that an agent may call over MCP. `tool.py` is the noun, `toolset.py` serves it."""

from rollyard.tools.answers import ToolAnswer
from rollyard.tools.remote import RemoteTools, openai_tool
from rollyard.tools.tool import Tool, ToolContext, ToolError, tool
from rollyard.tools.toolset import Toolset

__all__ = ["ToolAnswer", "RemoteTools", "Tool", "ToolContext", "ToolError", "Toolset", "openai_tool", "tool"]
