"""Context tools: a model's own means to keep a long chat short without losing what it left out.

    context = ContextTools(max_output_chars=10_000)
    message["content"] = context.shorten(output)                       # long outputs: the beginning, and how to see the rest
    if context.owns(call.name):
        text, history = await context.use(call.name, arguments, history)

Any loop that keeps a history of OpenAI-style messages can use them; `mcp_tools(chat)` offers the same ones over MCP. What
`manage_context` takes out of the history stays searchable. Patterns come from a model, and some patterns never end: they are
searched by a process of its own, which has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.tools.tool import Tool, ToolError, tool

Message = dict[str, Any]
HISTORY_HITS, OUTPUT_HITS, SNIPPET, PAGE = 10, 20, 200, 50
_SEARCH_S = 5.0
_CHARS_PER_TOKEN = 4
_KEPT_OUTPUTS = 50
_SEARCH = """
import json, re, sys
asked = json.load(sys.stdin)
found = []
for place, text in enumerate(asked["texts"]):
    for hit in re.finditer(asked["pattern"], text, re.IGNORECASE):
        found.append((place, hit.start()))
        if asked["once"]:
            break
    if len(found) > asked["most"]:
        break
json.dump(found, sys.stdout)
"""


def _schema(name: str, description: str, required: Sequence[str] = (), **properties: Mapping[str, Any]) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATTERN = {"type": "string", "description": "a regular expression; case does not matter"}
TOOLS: tuple[Message, ...] = (
    _schema("check_context", "How long the conversation is: messages, turns, characters, tokens (estimated)."),
    _schema(
        "manage_context",
        "Take older turns out of the conversation. They can still be searched with search_history.",
        ["keep_recent_turns"],
        keep_recent_turns={"type": "integer", "minimum": 1, "description": "how many of the last turns stay"},
    ),
    _schema(
        "search_history",
        f"Find text in the whole conversation, also in what was taken out ({HISTORY_HITS} hits).",
        ["pattern"],
        pattern=_PATTERN,
    ),
    _schema(
        "search_tool_output",
        f"Find lines in a tool output that was shortened ({OUTPUT_HITS} hits).",
        ["pattern"],
        pattern=_PATTERN,
        output={"type": "integer", "description": "which one; the last without it"},
    ),
    _schema(
        "view_tool_output",
        "Read a tool output that was shortened, page by page.",
        page={"type": "integer", "minimum": 1, "default": 1},
        page_size={"type": "integer", "minimum": 1, "maximum": 500, "default": PAGE},
        output={"type": "integer", "description": "which one; the last without it"},
    ),
)


class Chat(msgspec.Struct):
    """A history that MCP tools work on: the loop reads `messages` again after each call."""

    messages: list[Message] = []


class ContextTools:
    """One for each conversation. `max_tokens` is the model's window, where it is known."""

    def __init__(self, *, max_output_chars: int = 10_000, max_tokens: int | None = None) -> None:
        self._most, self._window = max_output_chars, max_tokens
        self._outputs: dict[int, str] = {}
        self._count = 0
        self._removed: list[Message] = []

    def reset(self) -> None:
        self._outputs.clear()
        self._removed.clear()
        self._count = 0

    @property
    def tools(self) -> list[Message]:
        """In OpenAI format."""
        return [dict(one) for one in TOOLS]

    def owns(self, name: str) -> bool:
        return any(one["function"]["name"] == name for one in TOOLS)

    def shorten(self, output: str) -> str:
        """The output itself, or its beginning with directions to the rest."""
        if len(output) <= self._most:
            return output
        self._count += 1
        self._outputs[self._count] = output
        for old in [number for number in self._outputs if number <= self._count - _KEPT_OUTPUTS]:
            del self._outputs[old]
        lines = output.count("\n") + 1
        return (
            f"{output[: self._most]}\n[output {self._count} goes on: {len(output)} characters, {lines} lines in all; "
            "use view_tool_output or search_tool_output]"
        )

    async def use(
        self, name: str, arguments: Mapping[str, Any], history: Sequence[Message]
    ) -> tuple[str, list[Message]]:
        """(what to tell the model, the history from now on). An error in a call is returned to the model, not raised."""
        kept = list(history)
        try:
            if name == "check_context":
                return self._check(kept), kept
            if name == "manage_context":
                return self._manage(kept, _number(arguments, "keep_recent_turns", 1, least=1))
            if name == "search_history":
                return await self._history(kept, _pattern(arguments)), kept
            if name == "search_tool_output":
                return await self._output_lines(_pattern(arguments), arguments.get("output")), kept
            if name == "view_tool_output":
                page, size = _number(arguments, "page", 1, least=1), _number(arguments, "page_size", PAGE, least=1)
                return self._page(page, min(size, 500), arguments.get("output")), kept
        except ToolError as error:
            return f"error: {error.message}", kept
        return f"error: there is no context tool named {name!r}", kept

    def mcp_tools(self, chat: Chat) -> list[Tool]:
        """The same as tools of a `Toolset`."""

        async def use(name: str, **arguments: Any) -> str:
            given = {key: value for key, value in arguments.items() if value is not None}
            text, chat.messages = await self.use(name, given, chat.messages)
            if text.startswith("error: "):
                raise ToolError(text.removeprefix("error: "))
            return text

        async def check_context() -> str:
            return await use("check_context")

        async def manage_context(keep_recent_turns: int) -> str:
            return await use("manage_context", keep_recent_turns=keep_recent_turns)

        async def search_history(pattern: str) -> str:
            return await use("search_history", pattern=pattern)

        async def search_tool_output(pattern: str, output: int | None = None) -> str:
            return await use("search_tool_output", pattern=pattern, output=output)

        async def view_tool_output(page: int = 1, page_size: int = PAGE, output: int | None = None) -> str:
            return await use("view_tool_output", page=page, page_size=page_size, output=output)

        words = {one["function"]["name"]: one["function"]["description"] for one in TOOLS}
        made = (check_context, manage_context, search_history, search_tool_output, view_tool_output)
        return [tool(description=words[one.__name__])(one) for one in made]

    def _check(self, history: Sequence[Message]) -> str:
        size = sum(len(text_of(message)) for message in history)
        tokens = size // _CHARS_PER_TOKEN
        share = f" of {self._window}" if self._window else ""
        return (
            f"{len(history)} messages in {len(_turns(history)[1])} turns, {size} characters, about {tokens}{share} tokens; "
            f"{len(self._removed)} messages taken out; {len(self._outputs)} long outputs kept"
        )

    def _manage(self, history: list[Message], keep: int) -> tuple[str, list[Message]]:
        first, turns = _turns(history)
        gone = [message for turn in turns[:-keep] for message in turn]
        self._removed += gone
        kept = [*first, *(message for turn in turns[-keep:] for message in turn)]
        return f"{len(gone)} messages were taken out, {len(kept)} stay; search_history finds the others", kept

    async def _history(self, history: Sequence[Message], pattern: str) -> str:
        messages = [*self._removed, *history]
        texts = [text_of(message) for message in messages]
        hits = await _search(pattern, texts, HISTORY_HITS, once=True)
        shown = [f"[{place}] {messages[place].get('role')}: {_excerpt(texts[place], at)}" for place, at in hits]
        return _list_matches(shown, HISTORY_HITS, pattern)

    async def _output_lines(self, pattern: str, number: Any) -> str:
        lines = self._output(number).splitlines()
        hits = await _search(pattern, lines, OUTPUT_HITS, once=True)
        return _list_matches([f"{place + 1}: {_excerpt(lines[place], at)}" for place, at in hits], OUTPUT_HITS, pattern)

    def _page(self, page: int, size: int, number: Any) -> str:
        lines = self._output(number).splitlines()
        pages = max(1, -(-len(lines) // size))
        if page > pages:
            raise ToolError(f"there are {pages} pages of {size} lines")
        shown = lines[(page - 1) * size : page * size]
        return "\n".join(
            [f"page {page} of {pages}, lines {(page - 1) * size + 1} to {(page - 1) * size + len(shown)}", *shown]
        )

    def _output(self, number: Any) -> str:
        wanted = self._count if number is None else number
        if wanted not in self._outputs:
            known = ", ".join(map(str, self._outputs)) or "none"
            raise ToolError(f"there is no shortened output {wanted}; there are: {known}")
        return self._outputs[wanted]


def text_of(message: Mapping[str, Any]) -> str:
    """All that a message says, tool calls included; an image is named."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def _turns(history: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """What came before the first answer (never taken out), then each answer with what followed it."""
    first: list[Message] = []
    turns: list[list[Message]] = []
    for message in history:
        if message.get("role") == "assistant":
            turns.append([message])
        else:
            (turns[-1] if turns else first).append(message)
    return first, turns


async def _search(pattern: str, texts: Sequence[str], most: int, *, once: bool) -> list[tuple[int, int]]:
    request = json.dumps({"pattern": pattern, "texts": list(texts), "most": most, "once": once}).encode()
    searching = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-c",
        _SEARCH,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SEARCH_S):
            out, _ = await searching.communicate(request)
    except TimeoutError:
        raise ToolError("this pattern takes too long: use a simpler one") from None
    finally:
        if searching.returncode is None:
            searching.kill()
            await searching.wait()
    if searching.returncode != 0:
        raise ToolError("this is no regular expression")
    return [(place, at) for place, at in msgspec.json.decode(out)]


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - SNIPPET // 4)
    snippet = text[start : start + SNIPPET].replace("\n", " ")
    return f"{'...' if start else ''}{snippet}{'...' if start + SNIPPET < len(text) else ''}"


def _list_matches(found: Sequence[str], most: int, pattern: str) -> str:
    if not found:
        return f"nothing matches {pattern!r}"
    more = [f"(the first {most})"] if len(found) > most else []
    return "\n".join([*found[:most], *more])


def _pattern(arguments: Mapping[str, Any]) -> str:
    pattern = arguments.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise ToolError("pattern is a text to look for")
    return pattern


def _number(arguments: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    given = arguments.get(name, default)
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ToolError(f"{name} is a whole number from {least} on")
    return given
