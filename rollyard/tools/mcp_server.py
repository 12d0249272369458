"""The `mcp` package's server around a `Toolset`. Importing this module costs a second: only `toolset` does, on first use."""

from __future__ import annotations

from typing import Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from rollyard.core.message import Image
from rollyard.tools.tool import ToolContext
from rollyard.tools.toolset import Toolset


def manager_of(toolset: Toolset) -> StreamableHTTPSessionManager:
    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, description=tool.description, input_schema=dict(tool.schema))
                for tool in toolset.tools.values()
            ]
        )

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        state: dict[str, Any] = context.request.scope.get("state", {})
        whose = ToolContext(rollout_id=str(state.get("rollout_id", "")))
        value, failed = await toolset.call(params.name, dict(params.arguments or {}), whose)
        return types.CallToolResult(
            content=[_content(value)],
            structured_content=value if isinstance(value, dict) else None,
            is_error=failed,
        )

    server: Server[Any] = Server(toolset.name, on_list_tools=list_tools, on_call_tool=call_tool)
    return StreamableHTTPSessionManager(app=server, json_response=True, stateless=True)


def _content(value: Any) -> types.ContentBlock:
    if isinstance(value, str):
        return types.TextContent(type="text", text=value)
    if isinstance(value, Image) and value.data is not None:
        return types.ImageContent(type="image", data=value.data, mime_type=value.media_type or "image/png")
    return types.TextContent(type="text", text=msgspec.json.encode(value).decode())
