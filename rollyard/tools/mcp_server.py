"""The `mcp` package's server around a `Toolset`. Importing this module costs a second: only `toolset` does, on first use.

Answers are streams, so that progress can travel before them, and clients of the handshake versions get a session, so that
`notifications/cancelled` finds the call it names; a client of the later, sessionless protocol cancels by hanging up. Sessions
that clients forget are bounded in number and in idle time, and end with the toolset.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from rollyard.core.message import Image, Text
from rollyard.tools.tool import ToolContext
from rollyard.tools.toolset import CALL_KEY, Toolset

_SESSIONS = 256
_BODY = 32 * 2**20


def manager_of(toolset: Toolset) -> StreamableHTTPSessionManager:
    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=dict(tool.schema),
                    _meta={CALL_KEY: True},
                )
                for tool in toolset.tools.values()
            ]
        )

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        state: dict[str, Any] = context.request.scope.get("state", {})
        whose = ToolContext(rollout_id=str(state.get("rollout_id", "")), progress=context.session.report_progress)
        key = (params.meta or {}).get(CALL_KEY)
        named = key if isinstance(key, str) else None
        value, failed = await toolset.call_apart(params.name, dict(params.arguments or {}), whose, named)
        return types.CallToolResult(
            content=[_content(part) for part in (value if _is_parts(value) else (value,))],
            structured_content=value if isinstance(value, dict) else None,
            is_error=failed,
        )

    server: Server[Any] = Server(toolset.name, on_list_tools=list_tools, on_call_tool=call_tool)
    return StreamableHTTPSessionManager(app=server, max_sessions=_SESSIONS, max_request_body_size=_BODY)


def _is_parts(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(part, (Text, Image)) for part in value)


def _content(value: Any) -> types.ContentBlock:
    if isinstance(value, (str, Text)):
        return types.TextContent(type="text", text=value.text if isinstance(value, Text) else value)
    if isinstance(value, Image) and value.data is not None:
        return types.ImageContent(type="image", data=value.data, mime_type=value.media_type or "image/png")
    return types.TextContent(type="text", text=msgspec.json.encode(value).decode())
