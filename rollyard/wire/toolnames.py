"""Tools in a namespace (Codex puts each MCP server's tools into one) against model servers that know flat names only.

A flat name is `namespace__name`. Towards an upstream names are flattened; in its reply they are put back where the call's
own tool list says, so that the message recorded is the message the agent will echo.
"""

from __future__ import annotations

import msgspec

from rollyard.core.message import Message, Part, ToolCall, ToolSpec
from rollyard.wire.body import dump, parse_object


def flat_name(tool: ToolSpec | ToolCall) -> str:
    return f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name


def resolve(tools: tuple[ToolSpec, ...], name: str) -> tuple[str | None, str]:
    """(namespace, name) of the tool a model called `name`; a name no tool has stays as it is."""
    inner: list[ToolSpec] = []
    for tool in tools:
        if tool.namespace is None:
            if tool.name == name:
                return None, name
        elif flat_name(tool) == name:
            return tool.namespace, tool.name
        elif tool.name == name:
            inner.append(tool)
    if len(inner) == 1:
        return inner[0].namespace, name
    return None, name


def in_namespaces(message: Message, tools: tuple[ToolSpec, ...]) -> Message:
    """The message with every flat tool name put back into its namespace."""
    if not any(tool.namespace for tool in tools):
        return message
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ToolCall) and part.namespace is None:
            namespace, name = resolve(tools, part.name)
            if namespace is not None:
                part = msgspec.structs.replace(part, namespace=namespace, name=name)
        parts.append(part)
    return Message(message.role, tuple(parts), message.name) if tuple(parts) != message.parts else message


def custom_tools(tools: tuple[ToolSpec, ...]) -> set[tuple[str | None, str]]:
    """Tools that take free text instead of JSON arguments."""
    return {(tool.namespace, tool.name) for tool in tools if tool.kind == "custom"}


CUSTOM_SCHEMA = '{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}'


def custom_arguments(text: str) -> str:
    """Free text in the canonical form, which is what a model sees that only knows functions."""
    return dump({"input": text}).decode()


def custom_input(arguments: str) -> str:
    given = parse_object(arguments)
    if given is not None and given.keys() == {"input"} and isinstance(given["input"], str):
        return given["input"]
    return arguments
