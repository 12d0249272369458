"""Arguments that a family writes one by one, as text: their JSON, with the types that the tool's schema names.

A value whose parameter is a string is kept to the letter; any other is read as JSON where it is JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.message import ToolCall, ToolSpec


def type_arguments(name: str, pairs: Iterable[tuple[str, str]], tools: Sequence[ToolSpec]) -> str:
    """The JSON object of `pairs`, for the tool called `name`."""
    properties = properties_of(name, tools)
    values = {key: value_of(text, properties.get(key) or {}) for key, text in pairs}
    return msgspec.json.encode(values).decode()


def properties_of(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, Any]:
    for tool in tools:
        if tool.name == name:
            try:
                schema = msgspec.json.decode(tool.schema)
            except BAD_JSON:
                return {}
            found = schema.get("properties") if isinstance(schema, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except BAD_JSON:
        return text


def spell_arguments(call: ToolCall) -> list[tuple[str, str]]:
    """The other way: each argument as the text that such a family writes."""
    try:
        values = msgspec.json.decode(call.arguments or "{}")
    except BAD_JSON:
        return []
    if not isinstance(values, dict):
        return []
    return [(str(k), v if isinstance(v, str) else msgspec.json.encode(v).decode()) for k, v in values.items()]
