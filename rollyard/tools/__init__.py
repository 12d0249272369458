"""Tools: functions on the host's side that an agent may call over MCP. `tool.py` is the noun, `toolset.py` serves it."""

from rollyard.tools.remote import RemoteTools
from rollyard.tools.tool import Tool, ToolContext, ToolError, tool
from rollyard.tools.toolset import Toolset

__all__ = ["RemoteTools", "Tool", "ToolContext", "ToolError", "Toolset", "tool"]
