"""An agent's output, bytes as they come, to typed events.

Whatever an agent prints survives: half lines wait for their rest, lines that are not the agent's format (banners, warnings,
broken JSON, a format that changed) become `raw`, undecodable bytes are shown as U+FFFD, and a line of any length costs its
own length once. Only a line past `MAX_LINE` is cut, into `raw` pieces.

What a line means is said by a function of the agent's, or by a table (`Agent.lines`): each rule names what a line must hold at a
path, names and numbers with dots between them (`message.content.0.text`), and where in it the words are. All rules that fit a
line give an event, in order; a JSON line that none fits gives none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from rollyard.core.agent import Agent, EventRule
from rollyard.core.events import AgentEvent

MAX_LINE = 16 * 2**20
Fields = dict[str, Any]
_MISSING = object()


def decode(line: str) -> Fields:
    """The JSON object on this line; ValueError when there is none."""
    if not line.startswith("{"):
        raise ValueError("not a JSON object")
    return cast("Fields", json.loads(line))


def plain_text(content: Any) -> str:
    """The words in a tool's result: a string, a list of text parts, or an object that holds such a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(plain_text(item) for item in cast("list[Any]", content))
    if isinstance(content, dict):
        fields = cast("Fields", content)
        return plain_text(fields.get("text") or fields.get("content") or fields.get("message"))
    return ""


def read_by_table(rules: Sequence[EventRule]) -> Callable[[str, str], Iterator[AgentEvent]]:
    """The `Agent.events` that these rules make."""

    def events(line: str, before: str) -> Iterator[AgentEvent]:
        found = decode(line)
        for rule in rules:
            if all(_at(found, path) == value for path, value in rule.when.items()):
                yield _event(rule, found)

    return events


def _event(rule: EventRule, found: Any) -> AgentEvent:
    fields = _at(found, rule.fields) if rule.fields is not None else {}
    return AgentEvent(
        kind=rule.kind,
        text=_words(found, rule.text) or "",
        tool=_words(found, rule.tool),
        call_id=_words(found, rule.call_id),
        ok=_success(rule, found) if rule.kind == "done" else None,
        fields=cast("Mapping[str, Any]", fields) if isinstance(fields, Mapping) else {},
    )


def _success(rule: EventRule, found: Any) -> bool:
    """What `ok` points to, or the contrary of `failed`; a `done` that has neither went well."""
    if rule.ok is not None:
        return _at(found, rule.ok) is True
    return rule.failed is None or _at(found, rule.failed) in (_MISSING, None, False, "", 0)


def _words(found: Any, path: str | None) -> str | None:
    value = _at(found, path) if path is not None else _MISSING
    return None if value is _MISSING or value is None else plain_text(value)


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get(name, _MISSING)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(name)]
        else:
            return _MISSING
    return value


class EventParser:
    """Feed it bytes, take events. One per started agent."""

    def __init__(self, agent: Agent, *, max_line: int = MAX_LINE) -> None:
        self._events = read_by_table(agent.lines) if agent.lines else agent.events
        self._max_line = max_line
        self._pieces: list[bytes] = []
        self._size = 0
        self._before = ""

    def feed(self, data: bytes) -> list[AgentEvent]:
        out: list[AgentEvent] = []
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._pieces.append(part)
            self._finish(out)
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
            if self._size > self._max_line:
                self._finish(out)
        return out

    def close(self) -> list[AgentEvent]:
        """What an unfinished last line held."""
        out: list[AgentEvent] = []
        if self._pieces:
            self._finish(out)
        return out

    def _finish(self, out: list[AgentEvent]) -> None:
        line = b"".join(self._pieces).decode("utf-8", "replace").rstrip("\r")
        self._pieces.clear()
        self._size = 0
        if line.strip():
            out.extend(self._read(line))
            self._before = line

    def _read(self, line: str) -> list[AgentEvent]:
        if self._events is None:
            return [AgentEvent(kind="raw", text=line)]
        try:
            return list(self._events(line, self._before))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            # not this agent's format: a banner, a warning, or a version that prints something else
            return [AgentEvent(kind="raw", text=line)]


def parse(agent: Agent) -> EventParser:
    return EventParser(agent)
