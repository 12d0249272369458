"""`RemoteTools`: the tools of an MCP server somewhere else, listed and called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from rollyard.core.errors import EnvError
from rollyard.core.message import ToolSpec

T = TypeVar("T")


class RemoteTools:
    """`async with RemoteTools(url, key) as tools`: every call has a deadline of `timeout_s`."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._key = key
        self._client: Any = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            return await self._connected()
        except Exception as error:
            await self._stack.aclose()
            raise EnvError(f"no tools can be reached at {self.url}: {type(error).__name__}") from error

    async def _connected(self) -> Self:
        import httpx2
        from mcp.client.client import Client
        from mcp.client.streamable_http import streamable_http_client

        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        http = await self._stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=self.timeout_s))
        self._client = await self._stack.enter_async_context(Client(streamable_http_client(self.url, http_client=http)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answer
        except Exception as error:
            raise EnvError(f"the tools at {self.url} did not answer: {type(error).__name__}") from error

    async def list(self) -> list[ToolSpec]:
        listed = await self._asked(self._client.list_tools())
        return [
            ToolSpec(t.name, t.description or "", msgspec.json.encode(t.input_schema).decode()) for t in listed.tools
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result as text; a tool that reports an error raises `EnvError` with its words."""
        result = await self._asked(self._client.call_tool(name, dict(arguments)))
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise EnvError(text or f"{name} failed")
        return text
