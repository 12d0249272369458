"""What an agent did, in the order it did it: `Deeds`, read from a rollout's calls and its file changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.message import Message, ToolCall
from rollyard.core.rollout import Rollout
from rollyard.runs.scan.diff import FileChange, read_diff

# What a finding takes the ground from: a reward above 0, one of 0, or either.
Invalidates = Literal["success", "failure", "both"]
_COMMANDS = ("command", "cmd", "script", "code", "input", "keystrokes")


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`call` is the number of the model call whose answer did it, `excerpt` the bytes that show it, `where` what they are part
    of: a tool call, a tool's result, the final words, or a file."""

    scanner: str
    rollout_id: str
    invalidates: Invalidates
    message: str
    where: str
    excerpt: str
    call: int | None = None


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call with what came back. `command` is what a shell or an interpreter was given, else the arguments."""

    call: int
    tool: str
    command: str
    result: str
    failed: bool


class Deeds(msgspec.Struct, frozen=True, kw_only=True):
    rollout: Rollout
    tools: tuple[Deed, ...]
    said: tuple[tuple[int, str], ...]  # what the model said, by call
    changes: tuple[FileChange, ...]

    @classmethod
    def of(cls, rollout: Rollout) -> Deeds:
        answers = list(_answers(rollout))
        results = _results(rollout)
        return cls(
            rollout=rollout,
            tools=tuple(_deed(seq, call, results) for seq, message in answers for call in message.tool_calls),
            said=tuple((seq, message.text) for seq, message in answers if message.text),
            changes=read_diff(rollout.diff or ""),
        )

    def find(
        self, scanner: str, invalidates: Invalidates, message: str, *, where: str, excerpt: str, call: int | None = None
    ) -> Finding:
        return Finding(
            scanner=scanner, rollout_id=self.rollout.id, invalidates=invalidates, message=message, where=where,
            excerpt=excerpt.strip()[:300], call=call,
        )  # fmt: skip


def _answers(rollout: Rollout) -> Iterator[tuple[int, Message]]:
    trajectory = rollout.trajectory
    if trajectory is None:
        return
    for record in trajectory.records:
        answer = trajectory.answer(record.id)
        if answer is not None:
            yield record.seq, answer.message


def _results(rollout: Rollout) -> dict[str, tuple[str, bool]]:
    """What came back, by the id of the tool call."""
    found: dict[str, tuple[str, bool]] = {}
    trajectory = rollout.trajectory
    for record in trajectory.records if trajectory is not None else ():
        for message in trajectory.messages(record.id) if trajectory is not None else ():
            for result in message.tool_results:
                text = "".join(getattr(part, "text", "") for part in result.parts)
                found.setdefault(result.call_id, (text, result.is_error))
    return found


def _deed(seq: int, call: ToolCall, results: Mapping[str, tuple[str, bool]]) -> Deed:
    result, failed = results.get(call.id, ("", False))
    return Deed(call=seq, tool=call.name, command=_command(call.arguments), result=result, failed=failed)


def _command(arguments: str) -> str:
    try:
        read: Any = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(read, dict):
        for name in _COMMANDS:
            value: Any = read.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if isinstance(value, str):
                return value
            if isinstance(value, list):
                return " ".join(str(word) for word in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return arguments
