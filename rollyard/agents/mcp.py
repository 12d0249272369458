"""MCP servers in each agent's own format: one small function per format, from `McpServer` values to a tree.

The gate's key travels in a header. Where a format can refer to an environment variable, the file holds that reference and
not the key (`Mcp.secret`); Codex names the variable in a field of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollyard.core.agent import Mcp, McpStyle
from rollyard.core.errors import ConfigError
from rollyard.core.task import McpServer

Tree = dict[str, Any]
KEY_VARIABLE = "ROLLYARD_KEY"


def entries(form: Mcp, servers: Iterable[McpServer], *, key: str) -> Tree:
    """Server name -> its entry. Names must be unique: agents silently keep one of two."""
    out: Tree = {}
    for server in servers:
        if server.name in out:
            raise ConfigError(f"two MCP servers are named {server.name!r}")
        if server.transport == "stdio" and not server.command:
            raise ConfigError(f"MCP server {server.name!r} has transport stdio and no command")
        if server.transport != "stdio" and not server.url:
            raise ConfigError(f"MCP server {server.name!r} has transport {server.transport} and no url")
        out[server.name] = _STYLES[form.style](server, _headers(server, form, key))
    return out


def _headers(server: McpServer, form: Mcp, key: str) -> dict[str, str]:
    if form.secret is None or not key:
        return dict(server.headers)
    return {name: value.replace(key, form.secret) for name, value in server.headers.items()}


def _claude(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        return {
            "type": "stdio",
            "command": server.command[0],
            "args": list(server.command[1:]),
            "env": dict(server.env),
        }
    return {"type": server.transport, "url": server.url, "headers": dict(headers)}


def _gemini(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        return {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env), "trust": True}
    where = "httpUrl" if server.transport == "http" else "url"
    return {where: server.url, "headers": dict(headers), "trust": True}


_CODEX_WAITS: Tree = {"startup_timeout_sec": 60, "tool_timeout_sec": 3600}


def _codex(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        return _CODEX_WAITS | {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}
    plain = {name: value for name, value in headers.items() if value != f"Bearer ${{{KEY_VARIABLE}}}"}
    entry: Tree = _CODEX_WAITS | {"url": server.url, "http_headers": plain}
    if len(plain) < len(headers):
        entry["bearer_token_env_var"] = KEY_VARIABLE
    return entry


def _opencode(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        return {"type": "local", "command": list(server.command), "environment": dict(server.env), "enabled": True}
    return {"type": "remote", "url": server.url, "headers": dict(headers), "enabled": True, "oauth": False}


def _goose(server: McpServer, headers: Mapping[str, str]) -> Tree:
    entry: Tree = {"enabled": True, "name": server.name, "description": server.name, "timeout": 300, "bundled": False}
    if server.transport == "stdio":
        return entry | {
            "type": "stdio",
            "cmd": server.command[0],
            "args": list(server.command[1:]),
            "envs": dict(server.env),
        }
    named = [KEY_VARIABLE] if any("${" + KEY_VARIABLE + "}" in value for value in headers.values()) else []
    return entry | {
        "type": "streamable_http",
        "uri": server.url,
        "headers": dict(headers),
        "envs": {},
        "env_keys": named,
    }


def _cline(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        command, *arguments = server.command
        return {"transport": {"type": "stdio", "command": command, "args": arguments, "env": dict(server.env)}}
    kind = "streamableHttp" if server.transport == "http" else "sse"
    return {"transport": {"type": kind, "url": server.url, "headers": dict(headers)}}


def _openhands(server: McpServer, headers: Mapping[str, str]) -> Tree:
    if server.transport == "stdio":
        return {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}
    return {"url": server.url, "transport": server.transport, "headers": dict(headers)}


_STYLES: dict[McpStyle, Callable[[McpServer, Mapping[str, str]], Tree]] = {
    "claude": _claude,
    "gemini": _gemini,
    "codex": _codex,
    "opencode": _opencode,
    "goose": _goose,
    "cline": _cline,
    "openhands": _openhands,
}
