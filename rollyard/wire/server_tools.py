"""What a request asks its provider to do on its own machines: tools that the provider runs (web search, web fetch, code, remote
MCP servers, file search, computers), and URLs of images and files that it fetches. Each reaches the network from outside of the
sandbox, so a rollout without the public network may ask for none.

Read from the bytes, because those are what a provider is sent. Tools are known by an allow-list of those that agents run
themselves: a provider's next one is not on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.call import Dialect
from rollyard.core.errors import BadRequest, RefusedMember

# Tools that the agent runs. Those of `messages` have a date behind their names.
_OWN: Mapping[Dialect, tuple[str, ...]] = {
    "chat": ("function", "custom"),
    "responses": ("function", "custom", "namespace", "local_shell", "apply_patch"),
    "messages": ("custom", "bash_", "text_editor_", "memory_", "tool_search_tool_"),
    "gemini": ("functionDeclarations", "function_declarations"),
}
_MEMBERS = ("web_search_options", "plugins", "mcp_servers", "container")  # of a request, beside its tools
_READ = frozenset({"tools", *_MEMBERS})
# Some servers read names in any case
_LINKS = ("image_url", "video_url", "audio_url", "file_url", "fileuri", "file_uri")
_ARGUMENTS = frozenset({"arguments", "args", "response", "tools", "parameters", "input_schema"})  # never content
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})  # whose `input` is arguments
_ENDS = (b'_url"', b'"url"', b'uri"')  # of a link's name
_LETTER = re.compile(rb"\\u00[4-7]")  # one that is written as a number, and could be part of one
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tools = msgspec.json.Decoder(list[dict[str, Any]])
_EMPTY = (b"", b"null", b"[]", b"{}")


def find_server_tools(dialect: Dialect, body: bytes) -> list[str]:
    """Names of what a provider would do itself for this request, in its own words. What is no request is left to others."""
    if not body:
        return []
    try:
        members = _members.decode(body)
        if odd := next((name for name in members if name not in _READ and name.lower() in _READ), None):
            raise ValueError(odd)
        found = [name for name in _MEMBERS if bytes(members.get(name, b"")) not in _EMPTY]
        if bytes(members.get("tools", b"")) not in _EMPTY:
            found += _list_tools(dialect, _tools.decode(members["tools"]))
        if _has_more(members, body) or any(_may_link(bytes(raw)) for name, raw in members.items() if name != "tools"):
            found += _find_links(json.loads(body, object_pairs_hook=_make_object))
    except (*BAD_JSON, ValueError):
        raise BadRequest("the request is not a JSON object with a list of tools") from None
    return list(dict.fromkeys(found))


def _may_link(raw: bytes) -> bool:
    raw = raw.lower()
    return any(end in raw for end in _ENDS) or (b"\\u00" in raw and _LETTER.search(raw) is not None)


def _has_more(members: Mapping[str, msgspec.Raw], body: bytes) -> bool:
    """Whether there is more than these members, written as JSON libraries do: another of the same name, or much space."""
    return len(body) > 4 + sum(len(name.encode()) + len(bytes(raw)) + 6 for name, raw in members.items())


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two members of one name are read differently by different servers."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("two members of one name")
    return found


def refuse_server_tools(dialect: Dialect, body: bytes) -> None:
    if found := find_server_tools(dialect, body):
        raise ServerToolRefused(found)


class ServerToolRefused(RefusedMember):
    """A request asks its provider for what the rollout's network does not allow."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        shown = ", ".join(repr(name[:60]) for name in names[:5])
        super().__init__(
            f"{shown}: this rollout has no public network, so its model server may not search, fetch or run anything for it; "
            "leave it out, and send images and files as data"
        )


def _list_tools(dialect: Dialect, tools: list[dict[str, Any]]) -> Iterator[str]:
    own = _OWN.get(dialect, ())
    for tool in tools:
        if dialect == "gemini":
            yield from (name for name in tool if name not in own)
            continue
        kind = tool.get("type") or ("custom" if dialect == "messages" else "function")
        if kind == "namespace":
            inner = tool.get("tools")
            yield from _list_tools(dialect, cast(list[dict[str, Any]], inner) if isinstance(inner, list) else [])
        elif kind == "shell" and dialect == "responses":
            if (tool.get("environment") or {"type": "local"}) != {"type": "local"}:
                yield "shell in a container"
        elif not isinstance(kind, str) or not _is_own(kind, own):
            yield str(kind)


def _is_own(kind: str, own: tuple[str, ...]) -> bool:
    return any(kind.startswith(name) if name.endswith("_") else kind == name for name in own)


def _find_links(value: Any) -> Iterator[str]:
    """URLs in content that a provider would fetch; those in arguments and results of tools are text."""
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _find_links(item)
    elif isinstance(value, dict):
        block = cast(dict[str, Any], value)
        for name, inner in block.items():
            if name.lower() in _LINKS or (name.lower() == "url" and block.get("type") == "url"):
                link = cast(dict[str, Any], inner).get("url") if isinstance(inner, dict) else inner
                if isinstance(link, str) and link and not link.startswith("data:"):
                    yield f"the URL of {name}" if name != "url" else "the URL of a source"
            elif name not in _ARGUMENTS and not (name == "input" and block.get("type") in _CALLS):
                yield from _find_links(inner)
