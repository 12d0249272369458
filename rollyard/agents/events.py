"""An agent's output, bytes as they come, to typed events.

Whatever an agent prints survives: half lines wait for their rest, lines that are not the agent's format (banners, warnings,
broken JSON, a format that changed) become `raw`, undecodable bytes are shown as U+FFFD, and a line of any length costs its
own length once. Only a line past `MAX_LINE` is cut, into `raw` pieces.
"""

from __future__ import annotations

import json
from typing import Any, cast

from rollyard.core.agent import Agent
from rollyard.core.events import AgentEvent

MAX_LINE = 16 * 2**20
Fields = dict[str, Any]


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


class EventParser:
    """Feed it bytes, take events. One per started agent."""

    def __init__(self, agent: Agent, *, max_line: int = MAX_LINE) -> None:
        self._events = agent.events
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
