"""`${VAR}` and `${VAR:-default}` in a task's env values, resolved from the host at the moment a sandbox opens.

A task keeps the template, never the value: tasks are stored, hashed and shown. A value that only contains a reference among
other text is literal, as Harbor has it; MCP headers may embed references anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.task import McpServer

_WHOLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_EMBEDDED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def _value(match: re.Match[str], host: Mapping[str, str], where: str) -> str:
    name, default = match[1], match[2]
    if name in host:
        return host[name]
    if default is None:
        raise ConfigError(
            f"{where} needs {name}, which is not set on the host or not for this task to read",
            hint=f"export {name}=...; a task from elsewhere also needs --env {name}",
        )
    return default


def resolve_env(env: Mapping[str, str], host: Mapping[str, str], *, where: str) -> dict[str, str]:
    """`where` says whose env it is, for the error: `task 'x': environment.env`."""
    resolved: dict[str, str] = {}
    for name, value in env.items():
        match = _WHOLE.fullmatch(value)
        resolved[name] = value if match is None else _value(match, host, f"{where}.{name}")
    return resolved


def resolve_text(text: str, host: Mapping[str, str], *, where: str) -> str:
    """Every reference in `text` replaced: for MCP headers and URLs."""
    return _EMBEDDED.sub(lambda match: _value(match, host, where), text)


def resolve_servers(servers: tuple[McpServer, ...], host: Mapping[str, str], *, where: str) -> tuple[McpServer, ...]:
    """MCP servers with the references in their headers, URLs and env replaced, for the moment the agent starts."""
    return tuple(
        msgspec.structs.replace(
            server,
            url=resolve_text(server.url, host, where=f"{where}: mcp {server.name}") if server.url else None,
            env=resolve_env(server.env, host, where=f"{where}: mcp {server.name}.env"),
            headers={
                name: resolve_text(value, host, where=f"{where}: mcp {server.name}.{name}")
                for name, value in server.headers.items()
            },
        )
        for server in servers
    )


def references(env: Mapping[str, str]) -> list[str]:
    """Host variables that must be set before this env can be used."""
    matches = [_WHOLE.fullmatch(value) for value in env.values()]
    return sorted({match[1] for match in matches if match is not None and match[2] is None})
