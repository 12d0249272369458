"""A model's own Jinja chat template, run the way its authors expect, in a sandbox.

Templates are code that comes with weights: they run in Jinja's immutable sandbox and may refuse a conversation by
`raise_exception`, which becomes `TemplateRefused`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, PolicyError
from rollyard.core.message import Image, Message, Opaque, Text, ToolCall, ToolResult, ToolSpec


class TemplateRefused(PolicyError):
    """The template does not accept this conversation."""


class ChatTemplate:
    """`values` are what a template may name besides the conversation: `bos_token`, `eos_token`, `enable_thinking` ..."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        import jinja2
        from jinja2 import meta
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks what the model writes; it changes nothing of the text."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        given: dict[str, Any] = {"raise_exception": refuse, "strftime_now": time.strftime}
        environment.filters["tojson"] = to_json
        environment.globals.update(given)
        try:
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error
        self.source = source
        self.takes_tools = bool(named & {"tools", "custom_tools", "builtin_tools"})
        self._values = dict(values)
        self._failure = jinja2.TemplateError

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation: bool) -> str:
        return self.render_raw([m for message in messages for m in as_chat(message)], tools, generation=generation)

    def render_raw(self, messages: list[dict[str, Any]], tools: Sequence[ToolSpec] = (), *, generation: bool) -> str:
        listed = [tool_as_chat(tool) for tool in tools] or None
        try:
            return self._template.render(
                **self._values, messages=messages, tools=listed, add_generation_prompt=generation
            )
        except TemplateRefused:
            raise
        except (self._failure, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}: {error}") from error


def refuse(message: str) -> None:
    raise TemplateRefused(f"the chat template refuses: {message}")


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def as_chat(message: Message) -> list[dict[str, Any]]:
    """A canonical message as templates know it; one that holds several tool results is one message for each."""
    if message.role == "tool":
        return [result_as_chat(result) for result in message.tool_results]
    out: dict[str, Any] = {"role": message.role, "content": text_of(message)}
    if message.name is not None:
        out["name"] = message.name
    if message.role == "assistant":
        if message.thinking:
            out["reasoning_content"] = message.thinking
        if message.tool_calls:
            out["tool_calls"] = [call_as_chat(call) for call in message.tool_calls]
    return [out]


def text_of(message: Message) -> str:
    """Text models read text: an image is refused here rather than dropped."""
    words: list[str] = []
    for part in message.parts:
        if isinstance(part, Text):
            words.append(part.text)
        elif isinstance(part, Image | Opaque):
            raise TemplateRefused(f"this renderer takes text, not {type(part).__name__.lower()} parts")
    return "".join(words)


def result_as_chat(result: ToolResult) -> dict[str, Any]:
    text = "".join(part.text if isinstance(part, Text) else "[not text]" for part in result.parts)
    out: dict[str, Any] = {"role": "tool", "tool_call_id": result.call_id, "content": text}
    return out | ({"name": result.name} if result.name is not None else {})


def call_as_chat(call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as a mapping where they are one."""
    arguments: Any = call.arguments or "{}"
    try:
        parsed = msgspec.json.decode(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    except BAD_JSON:
        pass  # written by a model: shown as it was written
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def tool_as_chat(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = msgspec.json.decode(tool.schema) if tool.schema else {}
    return {"type": "function", "function": function}
