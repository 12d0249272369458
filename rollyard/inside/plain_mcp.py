"""An MCP server in one file of the standard library, for programs that run inside a sandbox and have nothing installed.

    tools = Tools("shop")

    @tools.tool
    def price(item: str) -> float:
        "What an item costs."
        ...

    tools.serve(8700)

It speaks streamable HTTP at `/mcp` (JSON answers, no session of its own) and says at `/health` that it is there. It is copied
beside such a program and imported from there; nothing in this package imports it. It listens on loopback: who may reach that
is decided by what surrounds the sandbox.
"""

from __future__ import annotations

import base64
import inspect
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Union, get_args, get_origin, get_type_hints

_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_KINDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_MAX_BODY = 16 * 2**20
Page = Callable[[str, str, bytes], "tuple[int, str, bytes]"]  # method, path with query, body -> status, type, body

Health = Callable[[], "dict[str, Any]"]


class Picture:
    """A result that is an image."""

    def __init__(self, data: bytes, media_type: str = "image/png") -> None:
        self.data, self.media_type = data, media_type


class ToolFailure(Exception):
    """What a tool raises to tell its caller what was wrong."""


class Tools:
    """`one_at_a_time`: calls wait for each other, so tools need no locks of their own."""

    def __init__(self, name: str, *, one_at_a_time: bool = True) -> None:
        self.name = name
        self._tools: dict[str, Callable[..., Any]] = {}
        self._lock: Any = threading.Lock() if one_at_a_time else threading.Semaphore(64)

    def tool(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._tools[function.__name__] = function
        return function

    def serve(self, port: int, *, page: Page | None = None, health: Health | None = None) -> None:
        """Blocks. `page` answers what is neither MCP nor health: the web pages of an application. `health` says how it is."""
        own = {"page": staticmethod(page) if page else None, "health": staticmethod(health or _healthy)}
        handler = type("Handler", (_Handler,), {"tools": self, **own})
        ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A JSON-RPC request's result, or its error."""
        method, given = request.get("method"), request.get("params") or {}
        if method == "initialize":
            wanted = given.get("protocolVersion")
            result: dict[str, Any] = {
                "protocolVersion": wanted if wanted in _VERSIONS else _VERSIONS[1],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": self.name, "version": "1"},
            }
        elif method == "ping":
            result = {}
        elif method == "tools/list":
            result = {"tools": [_describe(name, function) for name, function in self._tools.items()]}
        elif method == "tools/call":
            if given.get("name") not in self._tools:
                return {"error": {"code": -32602, "message": f"there is no tool named {given.get('name')!r}"}}
            result = self._call(given["name"], given.get("arguments") or {})
        else:
            return {"error": {"code": -32601, "message": f"no method {method}"}}
        return {"result": result}

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            inspect.signature(self._tools[name]).bind(**arguments)
            with self._lock:
                found = self._tools[name](**arguments)
        except Exception as error:  # noqa: BLE001 - the caller of a tool gets the error, whatever it was
            words = str(error) if isinstance(error, ToolFailure) else f"{type(error).__name__}: {error}"
            return {"content": [{"type": "text", "text": words}], "isError": True}
        blocks = [_block(part) for part in (found if isinstance(found, tuple) else (found,))]
        result: dict[str, Any] = {"content": blocks}
        if isinstance(found, dict):
            result["structuredContent"] = found
        return result


def _healthy() -> dict[str, Any]:
    return {"status": "healthy"}


class _Handler(BaseHTTPRequestHandler):
    tools: Tools
    page: Page | None
    health: Health
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(min(int(self.headers.get("content-length") or 0), _MAX_BODY))
        if self.path != "/mcp":
            return self._page(body)
        try:
            request = json.loads(body)
            assert isinstance(request, dict)
        except (ValueError, AssertionError):
            return self._send(
                400, "application/json", b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"not JSON"}}'
            )
        if "id" not in request:
            return self._send(202, "application/json", b"")
        answered = {"jsonrpc": "2.0", "id": request["id"], **self.tools.answer(request)}
        return self._send(200, "application/json", json.dumps(answered).encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._send(200, "application/json", json.dumps(self.health(), default=str).encode())
        if self.path == "/mcp":
            return self._send(405, "text/plain", b"")
        return self._page(b"")

    def _page(self, body: bytes) -> None:
        if self.page is None:
            return self._send(404, "text/plain", b"not found")
        return self._send(*self.page(self.command, self.path, body))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Its output is the program's own."""


def _describe(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {
        "name": name,
        "description": inspect.getdoc(function) or "",
        "inputSchema": {
            "type": "object",
            "properties": {each: _schema(hints.get(each, str)) for each in parameters},
            "required": [each for each, value in parameters.items() if value.default is value.empty],
        },
    }


def _schema(hint: Any) -> dict[str, Any]:
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if (origin is Union or str(origin) == "<class 'types.UnionType'>") and parts:
        return _schema(parts[0])
    if str(origin) == "typing.Literal":
        return {"enum": parts}
    made: dict[str, Any] = {"type": _KINDS.get(origin or hint, "string")}
    if made["type"] == "array" and parts:
        made["items"] = _schema(parts[0])
    return made


def _block(value: Any) -> dict[str, Any]:
    if isinstance(value, Picture):
        return {"type": "image", "data": base64.b64encode(value.data).decode(), "mimeType": value.media_type}
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value)}
