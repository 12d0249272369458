"""Families that the `renderers` package knows (Qwen3, GLM, Kimi, DeepSeek, gpt-oss ...), as a renderer of ours.

It hand-writes each family's tokens and bridges only what it can prove; where it declines, so do we. What it finds of tool
calls is used where they parsed; anything else stays text, as the model wrote it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rollyard.core.call import ids as to_ids
from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.core.message import Message, ToolSpec, canonical_json
from rollyard.policy.parsers.protocol import assemble
from rollyard.policy.renderers.chat_template import as_chat, to_json, tool_as_chat
from rollyard.policy.renderers.protocol import Bridged, SampledTurn, Unbridgeable


class PlainTokenizer:
    """A `tokenizers.Tokenizer` with the few methods that the package asks for."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        self._tokenizer = tokenizer

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=options.get("add_special_tokens", False)).ids

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        one = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(one, skip_special_tokens=options.get("skip_special_tokens", False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def family_renderer(tokenizer: Any, family: str, name: str) -> FamilyRenderer:
    """`family` is a name of the package (`qwen3`, `glm45`, `gpt_oss` ...); `auto` goes by the model's name."""
    try:
        package: Any = import_module("renderers")
    except ImportError as error:
        raise MissingExtra("renderers", "tokens", why=f"the family {family!r}") from error
    try:
        made = package.create_renderer(PlainTokenizer(tokenizer, name), package.config_from_name(family))
    except Exception as error:  # the package raises what its parts raise; whichever it is, this family cannot be had
        raise ConfigError(f"no renderer for the family {family!r} on {name}: {error}") from error
    return FamilyRenderer(f"{family}:{name}", made, tokenizer)


class FamilyRenderer:
    def __init__(self, name: str, made: Any, tokenizer: Any) -> None:
        self.name = name
        self.stop_ids: tuple[int, ...] = tuple(made.get_stop_token_ids())
        self._made = made
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> array[int]:
        rendered = self._made.render_ids(chat(messages), tools=list_tools(tools), add_generation_prompt=True)
        return to_ids(rendered)

    def bridge(self, turn: SampledTurn, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Bridged:
        before, sampled = turn.strand[: turn.begun].tolist(), turn.completion.tolist()
        bridged = self._made.bridge_to_next_turn(before, sampled, chat(new), tools=list_tools(tools))
        if bridged is None:
            raise Unbridgeable("family_declines", f"{self.name} cannot prove this continuation")
        known = len(before) + len(sampled)
        whole: list[int] = bridged.token_ids
        if whole[:known] != before + sampled:
            raise Unbridgeable("prefix_changed", f"{self.name} changed ids that were sampled")
        added = to_ids(whole[known:])
        return Bridged(added, close_turn(added, sampled, self.stop_ids))

    def parse(self, completion: array[int], tools: Sequence[ToolSpec] = ()) -> Message:
        found = self._made.parse_response(completion.tolist(), tools=list_tools(tools))
        text: str = found.content or ""
        calls: list[tuple[str, str]] = []
        for call in found.tool_calls:
            if call.name is None or str(call.status) != "ok":
                text += call.raw
                continue
            arguments = call.arguments if isinstance(call.arguments, str) else to_json(call.arguments or {})
            calls.append((call.name, arguments))
        return assemble(found.reasoning_content, text, calls)

    def decode(self, ids: array[int]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def close_turn(added: array[int], sampled: list[int], stops: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A turn that was cut is closed by the bridge: those tokens were not sampled."""
    if sampled and sampled[-1] in stops:
        return ()
    at = next((n for n, token in enumerate(added) if token in stops), None)
    return () if at is None else ((0, at + 1),)


def chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for message in messages:
        for one in as_chat(message):
            for call in one.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = arguments if isinstance(arguments, dict) else canonical_json(arguments)
            out.append(one)
    return out


def list_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    """The package takes a tool without its `function` wrapping."""
    return [tool_as_chat(tool)["function"] for tool in tools] or None
