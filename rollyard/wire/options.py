"""Options whose shape differs by provider, in one canonical form each.

`tool_choice` is `auto`, `none`, `required`, or the chat form of a named function; `response_format` is the chat form;
`reasoning` is an object with any of `effort`, `budget`, `summary`, `enabled`, `display`. What no other provider has stays
in the body it came in: a call that goes to an upstream of its own dialect keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import astuple

from rollyard.core.call import Sampling
from rollyard.wire.body import dump, parse_json, parse_object

_EFFORT_OF_OTHERS = {"minimal": "low", "xhigh": "high", "max": "high"}
_BUDGETS = (("low", 2048), ("medium", 8192), ("high", 24576))


def text_of(value: Any) -> str:
    return dump(value).decode()


def name_choice(name: str) -> str:
    return text_of({"type": "function", "function": {"name": name}})


def choice_of(value: Any) -> str | None:
    """An OpenAI tool choice (chat or Responses) in the canonical form."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        function = value.get("function")
        name = value.get("name") or (function.get("name") if isinstance(function, dict) else None)
        if value.get("type") == "function" and isinstance(name, str):
            return name_choice(name)
    return text_of(value)


def choice_name(choice: str) -> str | None:
    """The function a canonical choice names."""
    value = parse_object(choice)
    function = value.get("function") if value else None
    return function.get("name") if isinstance(function, dict) else None


def chat_choice(choice: str) -> Any:
    value = parse_json(choice)
    return choice if value is None or not isinstance(value, dict) else value


def reasoning_of(**fields: Any) -> str | None:
    known = {name: value for name, value in fields.items() if value is not None}
    return text_of(known) if known else None


def reasoning(sampling: Sampling) -> Mapping[str, Any]:
    return (parse_object(sampling.reasoning) or {}) if sampling.reasoning else {}


def effort(sampling: Sampling) -> str | None:
    """low, medium or high: the words every server knows; None where nothing was asked or thinking is off."""
    wanted = reasoning(sampling)
    if wanted.get("enabled") is False:
        return None
    word = wanted.get("effort")
    if isinstance(word, str):
        word = _EFFORT_OF_OTHERS.get(word, word)
        return word if word in ("low", "medium", "high") else None
    budget = wanted.get("budget")
    if isinstance(budget, int) and budget > 0:
        return next((name for name, limit in _BUDGETS if budget <= limit), "high")
    return None


def format_of(sampling: Sampling) -> Mapping[str, Any] | None:
    return parse_object(sampling.response_format) if sampling.response_format else None


def schema_of(sampling: Sampling) -> Mapping[str, Any] | None:
    """The JSON Schema that `response_format` asks for."""
    wanted = format_of(sampling)
    if not wanted or wanted.get("type") != "json_schema":
        return None
    inner = wanted.get("json_schema")
    return inner.get("schema") if isinstance(inner, dict) else None


def find_changes(before: Sampling, after: Sampling) -> set[str]:
    """Names of the fields that a policy set differently from what the agent asked."""
    values = zip(Sampling.__struct_fields__, astuple(before), astuple(after), strict=True)
    return {name for name, one, other in values if one is not other and one != other}
